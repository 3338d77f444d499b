/* kvconv: run an exported decoder from C, or from anything that can call C.
 *
 *   #include <kvconv.h>
 *   #include <stdio.h>
 *
 *   int main(void) {
 *     kvconv_model_options options = KVCONV_MODEL_OPTIONS_INIT;
 *     kvconv_model *model = NULL;
 *     kvconv_generator *generator = NULL;
 *     const int32_t prompt[] = {504, 2365, 282};
 *     int32_t token = 0, finish = KVCONV_FINISH_NONE;
 *     if (kvconv_model_open("smollm2", &options, &model) ||
 *         kvconv_generator_create(model, 256, 0, &generator) ||
 *         kvconv_generator_append(generator, prompt, 3)) {
 *       fprintf(stderr, "%s\n", kvconv_last_error());
 *       return 1;
 *     }
 *     while (finish == KVCONV_FINISH_NONE &&
 *            !kvconv_generator_next(generator, NULL, &token, &finish))
 *       printf("%d\n", token);
 *     kvconv_generator_destroy(generator);
 *     kvconv_model_destroy(model);
 *     return 0;
 *   }
 *
 * Rules that hold for every function:
 *
 * - What can fail returns a kvconv_status: 0 is KVCONV_OK, the others are the kvconv_code values.
 *   The numbers never change; new ones may come, so treat an unknown one as failure. Then
 *   kvconv_last_error() is a text in UTF-8 that says what was wrong and what to do.
 * - Results come out through the last parameters, which are written on success only (but for
 *   `needed`, see below). Strings, paths too, are UTF-8 and end with a zero byte.
 * - A handle is a name, not an address: one that was destroyed, or is of another kind, is refused
 *   with KVCONV_INVALID_HANDLE. Handles are never used again for something else. Destroying NULL
 *   does nothing.
 * - Whatever order handles are destroyed in is right: a generator keeps its model alive.
 * - A model may be used by any number of threads at once. A generator, or a tokenizer stream, is
 *   used by one thread at a time; a second one is refused with KVCONV_BUSY and changes nothing.
 * - A buffer is given as (pointer, capacity, needed): `needed` is how many elements there are. When
 *   `capacity` is less, none is written and KVCONV_BUFFER_TOO_SMALL returned. Capacity 0 with a
 *   NULL pointer asks for the size.
 */
#ifndef KVCONV_H_
#define KVCONV_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(KVCONV_BUILDING_RUNTIME) && defined(_WIN32)
#define KVCONV_API __declspec(dllexport)
#elif defined(KVCONV_BUILDING_RUNTIME)
#define KVCONV_API __attribute__((visibility("default")))
#elif defined(_WIN32)
#define KVCONV_API __declspec(dllimport)
#else
#define KVCONV_API
#endif

/* Grows when a function or structure changes so that programs built before would break. */
#define KVCONV_ABI_VERSION 1u

typedef int32_t kvconv_status;

enum kvconv_code {
  KVCONV_OK = 0,
  KVCONV_INVALID_ARGUMENT = 1,  /* a value is out of range, or a pointer is NULL */
  KVCONV_INVALID_HANDLE = 2,    /* NULL, destroyed, or of another kind */
  KVCONV_ABI_MISMATCH = 3,      /* header and library do not belong together */
  KVCONV_BUNDLE_ERROR = 4,      /* the bundle is missing, damaged, or of a newer format */
  KVCONV_LIBRARY_ERROR = 5,     /* ONNX Runtime, the op library or the tokenizer library */
  KVCONV_CACHE_FULL = 6,        /* more tokens than the cache, or one run, takes; nothing has run */
  KVCONV_NOT_ENOUGH_MEMORY = 7, /* nothing was allocated */
  KVCONV_REWIND_ERROR = 8,      /* a ring no longer holds what the rest would see */
  KVCONV_PROMPT_ERROR = 9,      /* a prompt is empty, or there is no chat template for it */
  KVCONV_BUSY = 10,             /* another thread uses the handle now */
  KVCONV_BUFFER_TOO_SMALL = 11, /* `needed` says how much */
  KVCONV_FAILED = 12            /* ONNX Runtime failed in a run, or logits are not numbers */
};

/* Why kvconv_generator_next gave the last token of a text. */
enum kvconv_finish {
  KVCONV_FINISH_NONE = 0,  /* more may follow */
  KVCONV_FINISH_EOS = 1,   /* the token ends a text; it is not run */
  KVCONV_FINISH_LENGTH = 2 /* the cache has no place for a token behind this one */
};

/* Opaque: names of what the library owns. */
typedef struct kvconv_model kvconv_model;
typedef struct kvconv_generator kvconv_generator;
typedef struct kvconv_tokenizer kvconv_tokenizer;
typedef struct kvconv_text_stream kvconv_text_stream;

/* Returns the KVCONV_ABI_VERSION that the library was built with. */
KVCONV_API uint32_t kvconv_abi_version(void);

/* Returns the version of kvconv, such as "0.1.0"; lives as long as the library. */
KVCONV_API const char* kvconv_version(void);

/* Returns the text of the last failure on this thread; "" when there was none.
 * Valid until the next call of the library on this thread. */
KVCONV_API const char* kvconv_last_error(void);

/* ---- Models ------------------------------------------------------------------------------- */

/* How a model is opened. Begin with KVCONV_MODEL_OPTIONS_INIT; every field may stay as it is. */
typedef struct kvconv_model_options {
  uint32_t struct_size;       /* sizeof(kvconv_model_options) */
  uint32_t abi_version;       /* KVCONV_ABI_VERSION */
  int32_t threads;            /* of ONNX Runtime's pool; 0: a thread per core this process may use.
                                 Generators share it: for one thread per generator set 1. */
  int32_t no_spin;            /* 1: threads sleep while they wait; for machines that others use */
  int32_t use_bundle_library; /* 1: run the op library that lies in the bundle, which is code from
                                 whoever made the bundle */
  int32_t reserved;           /* 0 */
  const char* onnxruntime_library; /* path; NULL: $KVCONV_ONNXRUNTIME, then beside this library,
                                      then where the system looks */
  const char* op_library;          /* path; NULL: beside this library */
} kvconv_model_options;

#define KVCONV_MODEL_OPTIONS_INIT \
  {(uint32_t)sizeof(kvconv_model_options), KVCONV_ABI_VERSION, 0, 0, 0, 0, NULL, NULL}

/* What a model is. Set struct_size before the call. */
typedef struct kvconv_model_info {
  uint32_t struct_size; /* sizeof(kvconv_model_info) */
  int32_t vocab_size;
  int32_t max_sequence_length; /* most tokens, prompt and new, of one generator */
  int32_t num_layers;
  int32_t bos_token_id; /* -1: the model has none */
  int32_t num_eos_token_ids;
  int32_t max_prefill_chunk; /* most tokens that rings take at once; 0: the bundle has no rings */
  int32_t threads;
  int64_t weight_bytes;
} kvconv_model_info;

/* Opens a bundle: checks its manifest and files, loads the weights.
 *
 * bundle   path of the folder that `kvconv export` wrote.
 * options  begins with KVCONV_MODEL_OPTIONS_INIT.
 * out      the caller destroys it with kvconv_model_destroy.
 *
 * KVCONV_ABI_MISMATCH, KVCONV_BUNDLE_ERROR, KVCONV_LIBRARY_ERROR, KVCONV_NOT_ENOUGH_MEMORY. The
 * first model of a process decides which ONNX Runtime is used; asking for another one later fails.
 */
KVCONV_API kvconv_status kvconv_model_open(const char* bundle, const kvconv_model_options* options,
                                           kvconv_model** out);

/* Writes what the model is. */
KVCONV_API kvconv_status kvconv_model_get_info(kvconv_model* model, kvconv_model_info* out);

/* Writes the ids that end a text, ascending, into ids (capacity, needed: see the rules). */
KVCONV_API kvconv_status kvconv_model_get_eos_token_ids(kvconv_model* model, int32_t* ids,
                                                        int32_t capacity, int32_t* needed);

/* Lets go of a model; its generators go on. */
KVCONV_API void kvconv_model_destroy(kvconv_model* model);

/* ---- Generators ---------------------------------------------------------------------------- */

/* How kvconv_generator_next chooses a token; transformers' meanings, in its order: repetition
 * penalty, temperature, top_k, top_p, min_p. Begin with KVCONV_SAMPLING_INIT, which is greedy. */
typedef struct kvconv_sampling {
  uint32_t struct_size;      /* sizeof(kvconv_sampling) */
  int32_t top_k;             /* >= 0; 0 keeps all */
  double temperature;        /* 0: the most likely token; else in [0.001, 1000] */
  double top_p;              /* in [0, 1]; 1 keeps all */
  double min_p;              /* in [0, 1]; 0 keeps all */
  double repetition_penalty; /* in [0.001, 1000]; 1 changes nothing */
} kvconv_sampling;

#define KVCONV_SAMPLING_INIT {(uint32_t)sizeof(kvconv_sampling), 0, 0.0, 1.0, 0.0, 1.0}

/* What a generator has done and holds. Set struct_size before the call. */
typedef struct kvconv_generator_stats {
  uint32_t struct_size;    /* sizeof(kvconv_generator_stats) */
  int32_t length;          /* tokens so far, prompt and chosen */
  int32_t cached;          /* of those, in the cache: all, or all but the last one chosen */
  int32_t capacity;        /* most tokens */
  int32_t shortest_rewind; /* least length but 0 that kvconv_generator_rewind takes */
  int32_t reserved;        /* 0 */
  int64_t cache_bytes;     /* keys, values and scales: all buffers, used or not */
  int64_t prefill_tokens;  /* run by kvconv_generator_append */
  int64_t decode_tokens;   /* run by kvconv_generator_next */
  int64_t prefill_ns;      /* time of those runs */
  int64_t decode_ns;
  int64_t onnxruntime_ns; /* of both, inside ONNX Runtime */
} kvconv_generator_stats;

/* Makes a sequence with a KV cache of its own, and no tokens.
 *
 * capacity       most tokens, prompt and chosen, in [1, max_sequence_length]; 0 for the most.
 * prefill_chunk  most tokens of a prompt in one run; 0 for the default (512, less where rings take
 * less).
 *
 * KVCONV_CACHE_FULL when the model holds fewer tokens, KVCONV_NOT_ENOUGH_MEMORY when the full
 * cache and what a run takes are more than is free. */
KVCONV_API kvconv_status kvconv_generator_create(kvconv_model* model, int32_t capacity,
                                                 int32_t prefill_chunk, kvconv_generator** out);

/* Appends tokens and runs them (and a chosen one that has not run yet), in chunks.
 *
 * token_ids  in [0, vocab_size).
 * count      >= 1.
 *
 * KVCONV_CACHE_FULL when they do not fit; nothing has run then. When ONNX Runtime fails in a later
 * chunk (KVCONV_FAILED), the generator holds the tokens of the chunks before it. */
KVCONV_API kvconv_status kvconv_generator_append(kvconv_generator* generator,
                                                 const int32_t* token_ids, int32_t count);

/* Chooses the next token and appends it.
 *
 * A chosen token runs when the next one is wanted: a text of N chosen tokens takes N - 1 runs.
 *
 * sampling  NULL for the most likely token.
 * token_id  the token.
 * finish    a kvconv_finish. After KVCONV_FINISH_EOS the caller may go on all the same, by append
 * or next; after KVCONV_FINISH_LENGTH the next call gives KVCONV_CACHE_FULL.
 *
 * KVCONV_PROMPT_ERROR without a token. */
KVCONV_API kvconv_status kvconv_generator_next(kvconv_generator* generator,
                                               const kvconv_sampling* sampling, int32_t* token_id,
                                               int32_t* finish);

/* Gives the logits of what follows the last token, vocab_size float32; runs that token if it has
 * not run. The pointer is valid until the next call for this generator. KVCONV_PROMPT_ERROR
 * without a token. */
KVCONV_API kvconv_status kvconv_generator_get_logits(kvconv_generator* generator,
                                                     const float** logits, int32_t* count);

/* Writes all tokens so far into token_ids (capacity, needed: see the rules). */
KVCONV_API kvconv_status kvconv_generator_get_tokens(kvconv_generator* generator,
                                                     int32_t* token_ids, int32_t capacity,
                                                     int32_t* needed);

/* Lets draws be repeated: the same seed gives the same tokens, in Python too. Without a call every
 * generator draws its own. Sampling calls advance the state; rewind and reset do not touch it. */
KVCONV_API kvconv_status kvconv_generator_seed(kvconv_generator* generator, uint64_t seed);

/* Forgets all tokens from `length` on, in [0, tokens so far]. KVCONV_REWIND_ERROR when a ring has
 * overwritten what the rest would see; nothing has changed then. */
KVCONV_API kvconv_status kvconv_generator_rewind(kvconv_generator* generator, int32_t length);

/* Forgets all tokens; keeps the memory. */
KVCONV_API kvconv_status kvconv_generator_reset(kvconv_generator* generator);

/* Makes a copy with the same tokens, capacity and random state, independent from now on. Slots in
 * use are copied. Errors as kvconv_generator_create. */
KVCONV_API kvconv_status kvconv_generator_fork(kvconv_generator* generator, kvconv_generator** out);

/* Writes what the generator has done and holds. */
KVCONV_API kvconv_status kvconv_generator_get_stats(kvconv_generator* generator,
                                                    kvconv_generator_stats* out);

/* Lets go of a generator. */
KVCONV_API void kvconv_generator_destroy(kvconv_generator* generator);

/* ---- Text ---------------------------------------------------------------------------------- */

/* Opens the tokenizer of a bundle through onnxruntime-extensions' C library; token ids need none
 * of this.
 *
 * bundle   as for kvconv_model_open.
 * library  path; NULL: $KVCONV_TOKENIZER, then beside this library, then where the system looks.
 *
 * KVCONV_LIBRARY_ERROR when the library is not found, or refuses the tokenizer. Any number of
 * threads may use a tokenizer at once. */
KVCONV_API kvconv_status kvconv_tokenizer_open(const char* bundle, const char* library,
                                               kvconv_tokenizer** out);

/* Encodes a text into ids (capacity, needed: see the rules).
 *
 * add_special_tokens  1: add what the model expects around a text, such as BOS; 0 for a rendered
 * chat.
 *
 * KVCONV_PROMPT_ERROR when it holds a token that the model does not know, or is not UTF-8. */
KVCONV_API kvconv_status kvconv_tokenizer_encode(kvconv_tokenizer* tokenizer, const char* text,
                                                 int32_t add_special_tokens, int32_t* ids,
                                                 int32_t capacity, int32_t* needed);

/* Writes the text of ids, without special tokens, and a zero byte that `needed` counts. */
KVCONV_API kvconv_status kvconv_tokenizer_decode(kvconv_tokenizer* tokenizer, const int32_t* ids,
                                                 int32_t count, char* text, size_t capacity,
                                                 size_t* needed);

/* Renders a conversation with the bundle's chat template, up to where the model answers.
 *
 * roles, contents  `count` strings each, such as "user" and what the user said.
 * text             with a zero byte that `needed` counts; encode it with add_special_tokens 0.
 *
 * KVCONV_PROMPT_ERROR when the bundle has no template, or it refuses the conversation. */
KVCONV_API kvconv_status kvconv_tokenizer_render_chat(kvconv_tokenizer* tokenizer,
                                                      const char* const* roles,
                                                      const char* const* contents, int32_t count,
                                                      char* text, size_t capacity, size_t* needed);

/* Lets go of a tokenizer; its streams go on. */
KVCONV_API void kvconv_tokenizer_destroy(kvconv_tokenizer* tokenizer);

/* Makes a stream that turns ids into pieces of text; joined, they are the text of all ids. */
KVCONV_API kvconv_status kvconv_text_stream_create(kvconv_tokenizer* tokenizer,
                                                   kvconv_text_stream** out);

/* Takes one more id and gives the text that is certain now: whole characters, often "".
 * The pointer is valid until the next call for this stream. */
KVCONV_API kvconv_status kvconv_text_stream_push(kvconv_text_stream* stream, int32_t token_id,
                                                 const char** text);

/* Gives the text that is still held back, and begins anew. Pointer as for push. */
KVCONV_API kvconv_status kvconv_text_stream_flush(kvconv_text_stream* stream, const char** text);

/* Lets go of a stream. */
KVCONV_API void kvconv_text_stream_destroy(kvconv_text_stream* stream);

#ifdef __cplusplus
}
#endif

#endif /* KVCONV_H_ */
