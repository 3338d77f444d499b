using System;
using System.Runtime.InteropServices;

namespace Kvconv
{
    /// <summary>kvconv.h, function by function. "kvconv_runtime" is libkvconv_runtime.so, .dylib or
    /// kvconv_runtime.dll, where the system looks for libraries.</summary>
    internal static class NativeMethods
    {
        private const string Library = "kvconv_runtime";

        // KVCONV_ABI_VERSION
        internal const uint AbiVersion = 1;

        // kvconv_model_options
        [StructLayout(LayoutKind.Sequential)]
        internal struct ModelOptionsRaw
        {
            internal uint StructSize;
            internal uint AbiVersion;
            internal int Threads;
            internal int NoSpin;
            internal int UseBundleLibrary;
            internal int Reserved;
            internal IntPtr OnnxRuntimeLibrary;
            internal IntPtr OpLibrary;
        }

        // kvconv_model_info
        [StructLayout(LayoutKind.Sequential)]
        internal struct ModelInfoRaw
        {
            internal uint StructSize;
            internal int VocabSize;
            internal int MaxSequenceLength;
            internal int NumLayers;
            internal int BosTokenId;
            internal int NumEosTokenIds;
            internal int MaxPrefillChunk;
            internal int Threads;
            internal long WeightBytes;
        }

        // kvconv_sampling
        [StructLayout(LayoutKind.Sequential)]
        internal struct SamplingRaw
        {
            internal uint StructSize;
            internal int TopK;
            internal double Temperature;
            internal double TopP;
            internal double MinP;
            internal double RepetitionPenalty;
        }

        // kvconv_generator_stats
        [StructLayout(LayoutKind.Sequential)]
        internal struct GeneratorStatsRaw
        {
            internal uint StructSize;
            internal int Length;
            internal int Cached;
            internal int Capacity;
            internal int ShortestRewind;
            internal int Reserved;
            internal long CacheBytes;
            internal long PrefillTokens;
            internal long DecodeTokens;
            internal long PrefillNs;
            internal long DecodeNs;
            internal long OnnxRuntimeNs;
        }

        // const char *kvconv_last_error(void)
        [DllImport(Library)]
        internal static extern IntPtr kvconv_last_error();

        // kvconv_status kvconv_model_open(const char *, const kvconv_model_options *, kvconv_model **)
        [DllImport(Library)]
        internal static extern int kvconv_model_open(byte[] bundle, ref ModelOptionsRaw options, out IntPtr model);

        // kvconv_status kvconv_model_get_info(kvconv_model *, kvconv_model_info *)
        [DllImport(Library)]
        internal static extern int kvconv_model_get_info(ModelHandle model, ref ModelInfoRaw info);

        // void kvconv_model_destroy(kvconv_model *)
        [DllImport(Library)]
        internal static extern void kvconv_model_destroy(IntPtr model);

        // kvconv_status kvconv_generator_create(kvconv_model *, int32_t, int32_t, kvconv_generator **)
        [DllImport(Library)]
        internal static extern int kvconv_generator_create(
            ModelHandle model, int capacity, int prefillChunk, out IntPtr generator);

        // kvconv_status kvconv_generator_append(kvconv_generator *, const int32_t *, int32_t)
        [DllImport(Library)]
        internal static extern int kvconv_generator_append(GeneratorHandle generator, int[] tokenIds, int count);

        // kvconv_status kvconv_generator_next(kvconv_generator *, const kvconv_sampling *, int32_t *, int32_t *)
        [DllImport(Library)]
        internal static extern int kvconv_generator_next(
            GeneratorHandle generator, ref SamplingRaw sampling, out int tokenId, out int finish);

        // kvconv_status kvconv_generator_get_tokens(kvconv_generator *, int32_t *, int32_t, int32_t *)
        [DllImport(Library)]
        internal static extern int kvconv_generator_get_tokens(
            GeneratorHandle generator, [Out] int[] tokenIds, int capacity, out int needed);

        // kvconv_status kvconv_generator_seed(kvconv_generator *, uint64_t)
        [DllImport(Library)]
        internal static extern int kvconv_generator_seed(GeneratorHandle generator, ulong seed);

        // kvconv_status kvconv_generator_rewind(kvconv_generator *, int32_t)
        [DllImport(Library)]
        internal static extern int kvconv_generator_rewind(GeneratorHandle generator, int length);

        // kvconv_status kvconv_generator_fork(kvconv_generator *, kvconv_generator **)
        [DllImport(Library)]
        internal static extern int kvconv_generator_fork(GeneratorHandle generator, out IntPtr copy);

        // kvconv_status kvconv_generator_get_stats(kvconv_generator *, kvconv_generator_stats *)
        [DllImport(Library)]
        internal static extern int kvconv_generator_get_stats(GeneratorHandle generator, ref GeneratorStatsRaw stats);

        // void kvconv_generator_destroy(kvconv_generator *)
        [DllImport(Library)]
        internal static extern void kvconv_generator_destroy(IntPtr generator);

        // kvconv_status kvconv_tokenizer_open(const char *, const char *, kvconv_tokenizer **)
        [DllImport(Library)]
        internal static extern int kvconv_tokenizer_open(byte[] bundle, byte[] library, out IntPtr tokenizer);

        // kvconv_status kvconv_tokenizer_encode(kvconv_tokenizer *, const char *, int32_t, int32_t *, int32_t,
        //                                       int32_t *)
        [DllImport(Library)]
        internal static extern int kvconv_tokenizer_encode(
            TokenizerHandle tokenizer, byte[] text, int addSpecialTokens, [Out] int[] ids, int capacity,
            out int needed);

        // kvconv_status kvconv_tokenizer_decode(kvconv_tokenizer *, const int32_t *, int32_t, char *, size_t, size_t *)
        [DllImport(Library)]
        internal static extern int kvconv_tokenizer_decode(
            TokenizerHandle tokenizer, int[] ids, int count, [Out] byte[] text, UIntPtr capacity, out UIntPtr needed);

        // kvconv_status kvconv_tokenizer_render_chat(kvconv_tokenizer *, const char *const *, const char *const *,
        //                                            int32_t, char *, size_t, size_t *)
        [DllImport(Library)]
        internal static extern int kvconv_tokenizer_render_chat(
            TokenizerHandle tokenizer, IntPtr[] roles, IntPtr[] contents, int count, [Out] byte[] text,
            UIntPtr capacity, out UIntPtr needed);

        // void kvconv_tokenizer_destroy(kvconv_tokenizer *)
        [DllImport(Library)]
        internal static extern void kvconv_tokenizer_destroy(IntPtr tokenizer);

        // kvconv_status kvconv_text_stream_create(kvconv_tokenizer *, kvconv_text_stream **)
        [DllImport(Library)]
        internal static extern int kvconv_text_stream_create(TokenizerHandle tokenizer, out IntPtr stream);

        // kvconv_status kvconv_text_stream_push(kvconv_text_stream *, int32_t, const char **)
        [DllImport(Library)]
        internal static extern int kvconv_text_stream_push(TextStreamHandle stream, int tokenId, out IntPtr text);

        // kvconv_status kvconv_text_stream_flush(kvconv_text_stream *, const char **)
        [DllImport(Library)]
        internal static extern int kvconv_text_stream_flush(TextStreamHandle stream, out IntPtr text);

        // void kvconv_text_stream_destroy(kvconv_text_stream *)
        [DllImport(Library)]
        internal static extern void kvconv_text_stream_destroy(IntPtr stream);
    }
}
