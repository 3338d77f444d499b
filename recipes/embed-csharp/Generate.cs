// A bundle from C#.
//
//   Generate.exe BUNDLE PROMPT N      N greedy tokens behind a prompt, as text
//   Generate.exe --ids BUNDLE N ID... N greedy tokens behind token ids, as ids; needs no tokenizer
//   Generate.exe --users BUNDLE       two users in two threads, each a conversation of two turns
using System;
using System.Collections.Generic;
using System.IO;
using System.Linq;
using System.Text;
using System.Threading.Tasks;
using Kvconv;

public static class Generate
{
    private static void PrintText(TextWriter output, string bundle, string prompt, int maxNewTokens)
    {
        using (var model = new Model(bundle))
        using (var tokenizer = new Tokenizer(bundle))
        {
            int[] ids = tokenizer.Encode(prompt);
            using (var generator = new Generator(model, ids.Length + maxNewTokens))
            {
                generator.Append(ids);
                foreach (string piece in generator.Text(tokenizer, maxNewTokens))
                {
                    output.Write(piece);
                    output.Flush();
                }
            }
        }
    }

    private static void PrintIds(TextWriter output, string bundle, int maxNewTokens, int[] ids)
    {
        using (var model = new Model(bundle))
        using (var generator = new Generator(model, ids.Length + maxNewTokens))
        {
            generator.Append(ids);
            output.WriteLine(string.Join(" ", generator.Tokens(maxNewTokens).Select(token => token.Id)));
        }
    }

    /// <summary>Brings a generator to a history: what it begins with stays, the rest is taken back and run.</summary>
    private static void Follow(Generator generator, int[] ids)
    {
        int[] tokens = generator.TokenIds;
        int common = 0;
        while (common < tokens.Length && common + 1 < ids.Length && tokens[common] == ids[common])
        {
            ++common;
        }
        generator.Rewind(common);
        generator.Append(ids.Skip(common).ToArray());
    }

    private static string Converse(Model model, Tokenizer tokenizer, string name)
    {
        var transcript = new StringBuilder();
        var messages = new List<Message>();
        using (var generator = new Generator(model, 512))
        {
            foreach (string said in new[] { "My name is " + name + ".", "What is my name?" })
            {
                messages.Add(new Message("user", said));
                Follow(generator, tokenizer.Encode(tokenizer.RenderChat(messages), false));
                string answer = string.Concat(generator.Text(tokenizer, 32));
                messages.Add(new Message("assistant", answer));
                transcript.Append("> " + said + "\n" + answer + "\n");
            }
        }
        return transcript.ToString();
    }

    private static void RunUsers(TextWriter output, string bundle)
    {
        using (var model = new Model(bundle, new ModelOptions { Threads = 1 })) // one thread per generator
        using (var tokenizer = new Tokenizer(bundle))
        {
            var names = new[] { "Ada", "Grace" };
            Task<string>[] users =
                names.Select(name => Task.Run(() => Converse(model, tokenizer, name))).ToArray();
            foreach (Task<string> user in users)
            {
                output.WriteLine(user.GetAwaiter().GetResult());
            }
        }
    }

    public static int Main(string[] arguments)
    {
        var output = new StreamWriter(Console.OpenStandardOutput(), new UTF8Encoding(false));
        try
        {
            if (arguments.Length == 2 && arguments[0] == "--users")
            {
                RunUsers(output, arguments[1]);
            }
            else if (arguments.Length > 3 && arguments[0] == "--ids")
            {
                PrintIds(output, arguments[1], int.Parse(arguments[2]),
                         arguments.Skip(3).Select(int.Parse).ToArray());
            }
            else if (arguments.Length == 3)
            {
                PrintText(output, arguments[0], arguments[1], int.Parse(arguments[2]));
            }
            else
            {
                Console.Error.WriteLine(
                    "usage: Generate.exe BUNDLE PROMPT N | --ids BUNDLE N ID... | --users BUNDLE");
                return 2;
            }
            output.Flush();
            return 0;
        }
        catch (KvconvException error)
        {
            Console.Error.WriteLine(error.Message);
            return 1;
        }
    }
}
