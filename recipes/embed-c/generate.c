/* A bundle from C.
 *
 *   generate BUNDLE PROMPT N     N greedy tokens behind a prompt, as text
 *   generate --ids BUNDLE N ID.. N greedy tokens behind token ids, as ids; needs no tokenizer
 *   generate --users BUNDLE      four users in four threads, a rewind, a fork
 */
#include <kvconv.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void fail(void) {
  fprintf(stderr, "%s\n", kvconv_last_error());
  exit(1);
}

#define CHECK(call)   \
  do {                \
    if (call) fail(); \
  } while (0)

static kvconv_model* open_model(const char* bundle, int32_t threads) {
  kvconv_model_options options = KVCONV_MODEL_OPTIONS_INIT;
  kvconv_model* model = NULL;
  options.threads = threads;
  CHECK(kvconv_model_open(bundle, &options, &model));
  return model;
}

/* Returns the ids of a text; the caller frees them. */
static int32_t* encode(kvconv_tokenizer* tokenizer, const char* text, int32_t special,
                       int32_t* count) {
  int32_t* ids;
  kvconv_status status = kvconv_tokenizer_encode(tokenizer, text, special, NULL, 0, count);
  if (status && status != KVCONV_BUFFER_TOO_SMALL) fail();
  ids = malloc(sizeof(int32_t) * (size_t)(*count ? *count : 1));
  CHECK(kvconv_tokenizer_encode(tokenizer, text, special, ids, *count, count));
  return ids;
}

static void print_text(const char* bundle, const char* prompt, int32_t max_new_tokens) {
  kvconv_model* model = open_model(bundle, 0);
  kvconv_generator* generator = NULL;
  kvconv_tokenizer* tokenizer = NULL;
  kvconv_text_stream* stream = NULL;
  const char* piece = "";
  int32_t count = 0, token = 0, finish = KVCONV_FINISH_NONE, i, *ids;

  CHECK(kvconv_tokenizer_open(bundle, NULL, &tokenizer));
  CHECK(kvconv_text_stream_create(tokenizer, &stream));
  ids = encode(tokenizer, prompt, 1, &count);
  CHECK(kvconv_generator_create(model, count + max_new_tokens, 0, &generator));
  CHECK(kvconv_generator_append(generator, ids, count));
  for (i = 0; i < max_new_tokens && finish == KVCONV_FINISH_NONE; ++i) {
    CHECK(kvconv_generator_next(generator, NULL, &token, &finish));
    if (finish == KVCONV_FINISH_EOS) break;
    CHECK(kvconv_text_stream_push(stream, token, &piece));
    fputs(piece, stdout);
    fflush(stdout);
  }
  CHECK(kvconv_text_stream_flush(stream, &piece));
  fputs(piece, stdout);
  free(ids);
  kvconv_text_stream_destroy(stream);
  kvconv_generator_destroy(generator);
  kvconv_tokenizer_destroy(tokenizer);
  kvconv_model_destroy(model);
}

static void print_ids(const char* bundle, int32_t max_new_tokens, const int32_t* ids,
                      int32_t count) {
  kvconv_model* model = open_model(bundle, 0);
  kvconv_generator* generator = NULL;
  int32_t token = 0, finish = KVCONV_FINISH_NONE, i;

  CHECK(kvconv_generator_create(model, count + max_new_tokens, 0, &generator));
  CHECK(kvconv_generator_append(generator, ids, count));
  for (i = 0; i < max_new_tokens && finish == KVCONV_FINISH_NONE; ++i) {
    CHECK(kvconv_generator_next(generator, NULL, &token, &finish));
    printf("%d ", token);
  }
  putchar('\n');
  kvconv_generator_destroy(generator);
  kvconv_model_destroy(model);
}

typedef struct user {
  kvconv_model* model;
  int32_t first; /* what the user says: a few ids behind this one */
  int32_t tokens[16], others[16];
} user;

/* Each thread has a generator of its own; the model is shared. */
static void* serve(void* argument) {
  user* self = argument;
  kvconv_generator *generator = NULL, *copy = NULL;
  kvconv_sampling sampling = KVCONV_SAMPLING_INIT;
  int32_t prompt[8], again[16], i, finish;

  for (i = 0; i < 8; ++i) prompt[i] = self->first + i;
  sampling.temperature = 0.8;
  sampling.top_k = 40;
  CHECK(kvconv_generator_create(self->model, 64, 0, &generator));
  CHECK(kvconv_generator_append(generator, prompt, 8));
  CHECK(kvconv_generator_seed(generator, 7));
  CHECK(kvconv_generator_fork(generator, &copy)); /* the same tokens and random state */
  for (i = 0; i < 16; ++i)
    CHECK(kvconv_generator_next(generator, &sampling, &self->tokens[i], &finish));
  for (i = 0; i < 16; ++i) CHECK(kvconv_generator_next(copy, &sampling, &again[i], &finish));
  if (memcmp(again, self->tokens, sizeof(again)) != 0) {
    fprintf(stderr, "a copy went another way\n");
    exit(1);
  }
  CHECK(kvconv_generator_rewind(generator, 8)); /* take the answer back and give another one */
  for (i = 0; i < 16; ++i)
    CHECK(kvconv_generator_next(generator, &sampling, &self->others[i], &finish));
  kvconv_generator_destroy(copy);
  kvconv_generator_destroy(generator);
  return NULL;
}

static void run_users(const char* bundle, int32_t num_users) {
  kvconv_model* model = open_model(bundle, 1); /* one thread per generator */
  user* users = calloc((size_t)num_users, sizeof(user));
  pthread_t* threads = calloc((size_t)num_users, sizeof(pthread_t));
  int32_t i, j;

  for (i = 0; i < num_users; ++i) {
    users[i].model = model;
    users[i].first = 20 + 10 * i;
    pthread_create(&threads[i], NULL, serve, &users[i]);
  }
  for (i = 0; i < num_users; ++i) {
    pthread_join(threads[i], NULL);
    printf("user %d:", i);
    for (j = 0; j < 16; ++j) printf(" %d", users[i].tokens[j]);
    printf("\n   then:");
    for (j = 0; j < 16; ++j) printf(" %d", users[i].others[j]);
    putchar('\n');
  }
  free(threads);
  free(users);
  kvconv_model_destroy(model);
}

int main(int argc, char** argv) {
  if (argc == 3 && strcmp(argv[1], "--users") == 0) {
    run_users(argv[2], 4);
  } else if (argc > 4 && strcmp(argv[1], "--ids") == 0) {
    int32_t count = argc - 4, i, *ids = malloc(sizeof(int32_t) * (size_t)count);
    for (i = 0; i < count; ++i) ids[i] = atoi(argv[4 + i]);
    print_ids(argv[2], atoi(argv[3]), ids, count);
    free(ids);
  } else if (argc == 4) {
    print_text(argv[1], argv[2], atoi(argv[3]));
  } else {
    fprintf(stderr, "usage: generate BUNDLE PROMPT N | --ids BUNDLE N ID... | --users BUNDLE\n");
    return 2;
  }
  return 0;
}
