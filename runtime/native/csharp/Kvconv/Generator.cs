using System;
using System.Collections.Generic;
using System.Runtime.InteropServices;

namespace Kvconv
{
    /// <summary>How tokens are chosen; greedy as it is.</summary>
    public sealed class Sampling
    {
        /// <summary>0: the most likely token; else in [0.001, 1000].</summary>
        public double Temperature { get; set; }

        /// <summary>0 keeps all.</summary>
        public int TopK { get; set; }

        /// <summary>In [0, 1]; 1 keeps all.</summary>
        public double TopP { get; set; } = 1;

        /// <summary>In [0, 1]; 0 keeps all.</summary>
        public double MinP { get; set; }

        /// <summary>In [0.001, 1000]; 1 changes nothing.</summary>
        public double RepetitionPenalty { get; set; } = 1;

        internal NativeMethods.SamplingRaw ToRaw()
        {
            return new NativeMethods.SamplingRaw
            {
                StructSize = (uint)Marshal.SizeOf(typeof(NativeMethods.SamplingRaw)),
                TopK = TopK,
                Temperature = Temperature,
                TopP = TopP,
                MinP = MinP,
                RepetitionPenalty = RepetitionPenalty
            };
        }
    }

    /// <summary>Why a token is the last one.</summary>
    public enum Finish
    {
        /// <summary>More may follow.</summary>
        None = 0,
        /// <summary>The token ends a text.</summary>
        Eos = 1,
        /// <summary>The cache has no place for another.</summary>
        Length = 2
    }

    /// <summary>A token that was chosen.</summary>
    public struct Token
    {
        internal Token(int id, int finish)
        {
            Id = id;
            Finish = (Finish)finish;
        }

        /// <summary>The token's id.</summary>
        public int Id { get; }

        /// <summary>Whether it is the last one.</summary>
        public Finish Finish { get; }
    }

    /// <summary>One sequence with its cache; one thread at a time.</summary>
    public sealed class Generator : IDisposable
    {
        private readonly GeneratorHandle handle;

        /// <summary>Makes an empty sequence.</summary>
        /// <param name="model">The model.</param>
        /// <param name="capacity">Most tokens, prompt and chosen; 0 for the most that the model holds.</param>
        /// <param name="prefillChunk">Most tokens of a prompt in one run; 0 for the default.</param>
        public Generator(Model model, int capacity = 0, int prefillChunk = 0)
        {
            IntPtr created;
            Status.ThrowIfError(
                NativeMethods.kvconv_generator_create(model.Handle, capacity, prefillChunk, out created));
            handle = new GeneratorHandle(created);
        }

        private Generator(GeneratorHandle handle)
        {
            this.handle = handle;
        }

        /// <summary>Appends tokens and runs them.</summary>
        public void Append(int[] tokenIds)
        {
            Status.ThrowIfError(NativeMethods.kvconv_generator_append(handle, tokenIds, tokenIds.Length));
        }

        /// <summary>Chooses the next token and appends it.</summary>
        public Token Next(Sampling sampling = null)
        {
            var raw = (sampling ?? new Sampling()).ToRaw();
            int id;
            int finish;
            Status.ThrowIfError(NativeMethods.kvconv_generator_next(handle, ref raw, out id, out finish));
            return new Token(id, finish);
        }

        /// <summary>Chooses tokens as they are asked for, at most so many, up to one that is the last.</summary>
        public IEnumerable<Token> Tokens(int maxNewTokens, Sampling sampling = null)
        {
            for (int i = 0; i < maxNewTokens; ++i)
            {
                Token token = Next(sampling);
                yield return token;
                if (token.Finish != Finish.None)
                {
                    yield break;
                }
            }
        }

        /// <summary>The text of the same tokens, in pieces that are not empty.</summary>
        public IEnumerable<string> Text(Tokenizer tokenizer, int maxNewTokens, Sampling sampling = null)
        {
            using (var stream = new TextStream(tokenizer))
            {
                foreach (Token token in Tokens(maxNewTokens, sampling))
                {
                    string piece = token.Finish == Finish.Eos ? "" : stream.Push(token.Id);
                    if (piece.Length > 0)
                    {
                        yield return piece;
                    }
                }
                string rest = stream.Flush();
                if (rest.Length > 0)
                {
                    yield return rest;
                }
            }
        }

        /// <summary>All tokens so far.</summary>
        public int[] TokenIds
        {
            get
            {
                var ids = new int[Length];
                int needed;
                Status.ThrowIfError(NativeMethods.kvconv_generator_get_tokens(handle, ids, ids.Length, out needed));
                return ids;
            }
        }

        /// <summary>How many tokens there are.</summary>
        public int Length
        {
            get { return GetStats().Length; }
        }

        /// <summary>Bytes of the cache's buffers, used or not.</summary>
        public long CacheBytes
        {
            get { return GetStats().CacheBytes; }
        }

        /// <summary>Lets draws be repeated.</summary>
        public void Seed(ulong seed)
        {
            Status.ThrowIfError(NativeMethods.kvconv_generator_seed(handle, seed));
        }

        /// <summary>Forgets all tokens from `length` on.</summary>
        public void Rewind(int length)
        {
            Status.ThrowIfError(NativeMethods.kvconv_generator_rewind(handle, length));
        }

        /// <summary>Makes an independent copy.</summary>
        public Generator Fork()
        {
            IntPtr copy;
            Status.ThrowIfError(NativeMethods.kvconv_generator_fork(handle, out copy));
            return new Generator(new GeneratorHandle(copy));
        }

        /// <summary>Lets go of the sequence.</summary>
        public void Dispose()
        {
            handle.Dispose();
        }

        private NativeMethods.GeneratorStatsRaw GetStats()
        {
            var stats = new NativeMethods.GeneratorStatsRaw
            {
                StructSize = (uint)Marshal.SizeOf(typeof(NativeMethods.GeneratorStatsRaw))
            };
            Status.ThrowIfError(NativeMethods.kvconv_generator_get_stats(handle, ref stats));
            return stats;
        }
    }
}
