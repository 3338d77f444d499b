// A bundle from C++17.
//
//   generate BUNDLE PROMPT N      N greedy tokens behind a prompt, as text
//   generate --ids BUNDLE N ID... N greedy tokens behind token ids, as ids; needs no tokenizer
//   generate --users BUNDLE       four users in four threads, each a conversation of two turns
#include <cstdlib>
#include <iostream>
#include <kvconv.hpp>
#include <string>
#include <thread>

namespace {

void print_text(const std::string& bundle, const std::string& prompt, int max_new_tokens) {
  const kvconv::Model model(bundle);
  const kvconv::Tokenizer tokenizer(bundle);
  const std::vector<std::int32_t> ids = tokenizer.encode(prompt);
  kvconv::Generator generator(model, static_cast<std::int32_t>(ids.size()) + max_new_tokens);
  generator.append(ids);
  for (const std::string& piece : kvconv::text(generator, tokenizer, max_new_tokens)) {
    std::cout << piece << std::flush;
  }
}

void print_ids(const std::string& bundle, int max_new_tokens,
               const std::vector<std::int32_t>& ids) {
  const kvconv::Model model(bundle);
  kvconv::Generator generator(model, static_cast<std::int32_t>(ids.size()) + max_new_tokens);
  generator.append(ids);
  for (const kvconv::Token& token : kvconv::tokens(generator, max_new_tokens))
    std::cout << token.id << ' ';
  std::cout << '\n';
}

// Brings a generator to a history: what it begins with stays, the rest is taken back and run.
void follow(kvconv::Generator& generator, const std::vector<std::int32_t>& ids) {
  const std::vector<std::int32_t> tokens = generator.tokens();
  std::size_t common = 0;
  while (common < tokens.size() && common + 1 < ids.size() && tokens[common] == ids[common])
    ++common;
  generator.rewind(static_cast<std::int32_t>(common));
  generator.append({ids.begin() + static_cast<std::ptrdiff_t>(common), ids.end()});
}

std::string converse(const kvconv::Model& model, const kvconv::Tokenizer& tokenizer,
                     const std::string& name) {
  kvconv::Generator generator(model, 512);
  std::vector<kvconv::Message> messages;
  std::string transcript;
  for (const std::string& said : {"My name is " + name + ".", std::string("What is my name?")}) {
    messages.push_back({"user", said});
    follow(generator, tokenizer.encode(tokenizer.render_chat(messages), false));
    std::string answer;
    for (const std::string& piece : kvconv::text(generator, tokenizer, 32)) answer += piece;
    messages.push_back({"assistant", answer});
    transcript += "> " + said + "\n" + answer + "\n";
  }
  return transcript;
}

void run_users(const std::string& bundle) {
  kvconv::ModelOptions options;
  options.threads = 1;  // one thread per generator
  const kvconv::Model model(bundle, options);
  const kvconv::Tokenizer tokenizer(bundle);
  const std::vector<std::string> names = {"Ada", "Grace", "Alan", "Edsger"};
  std::vector<std::string> transcripts(names.size());
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < names.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        transcripts[i] = converse(model, tokenizer, names[i]);
      } catch (const kvconv::Error& error) {
        transcripts[i] = std::string("error: ") + error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& transcript : transcripts) std::cout << transcript << '\n';
}

}  // namespace

int main(int argc, char** argv) try {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.size() == 2 && arguments[0] == "--users") {
    run_users(arguments[1]);
  } else if (arguments.size() > 3 && arguments[0] == "--ids") {
    std::vector<std::int32_t> ids;
    for (std::size_t i = 3; i < arguments.size(); ++i) ids.push_back(std::stoi(arguments[i]));
    print_ids(arguments[1], std::stoi(arguments[2]), ids);
  } else if (arguments.size() == 3) {
    print_text(arguments[0], arguments[1], std::stoi(arguments[2]));
  } else {
    std::cerr << "usage: generate BUNDLE PROMPT N | --ids BUNDLE N ID... | --users BUNDLE\n";
    return 2;
  }
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
