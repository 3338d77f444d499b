using System;
using System.Collections.Generic;
using System.Runtime.InteropServices;

namespace Kvconv
{
    /// <summary>What somebody said in a conversation.</summary>
    public sealed class Message
    {
        /// <summary>By role, such as "user", and content.</summary>
        public Message(string role, string content)
        {
            Role = role;
            Content = content;
        }

        /// <summary>Who said it.</summary>
        public string Role { get; }

        /// <summary>What was said.</summary>
        public string Content { get; }
    }

    /// <summary>A bundle's tokenizer; any number of threads may use it.</summary>
    public sealed class Tokenizer : IDisposable
    {
        /// <summary>Opens it through onnxruntime-extensions' library, which is searched for where null.</summary>
        public Tokenizer(string bundle, string library = null)
        {
            IntPtr created;
            Status.ThrowIfError(
                NativeMethods.kvconv_tokenizer_open(Utf8.Write(bundle), Utf8.Write(library), out created));
            Handle = new TokenizerHandle(created);
        }

        internal TokenizerHandle Handle { get; }

        /// <summary>Encodes a text; without special tokens for a rendered conversation.</summary>
        public int[] Encode(string text, bool addSpecialTokens = true)
        {
            byte[] raw = Utf8.Write(text);
            int special = addSpecialTokens ? 1 : 0;
            int needed;
            Status.ThrowUnlessTooSmall(
                NativeMethods.kvconv_tokenizer_encode(Handle, raw, special, null, 0, out needed));
            var ids = new int[needed];
            Status.ThrowIfError(
                NativeMethods.kvconv_tokenizer_encode(Handle, raw, special, ids, ids.Length, out needed));
            return ids;
        }

        /// <summary>Returns the text of ids, without special tokens.</summary>
        public string Decode(int[] ids)
        {
            UIntPtr needed;
            Status.ThrowUnlessTooSmall(
                NativeMethods.kvconv_tokenizer_decode(Handle, ids, ids.Length, null, UIntPtr.Zero, out needed));
            var text = new byte[(int)needed];
            Status.ThrowIfError(
                NativeMethods.kvconv_tokenizer_decode(Handle, ids, ids.Length, text, needed, out needed));
            return Utf8.Read(text);
        }

        /// <summary>Renders a conversation with the bundle's chat template, up to the answer.</summary>
        public string RenderChat(IReadOnlyList<Message> messages)
        {
            var roles = new IntPtr[messages.Count];
            var contents = new IntPtr[messages.Count];
            try
            {
                for (int i = 0; i < messages.Count; ++i)
                {
                    roles[i] = Utf8.Allocate(messages[i].Role);
                    contents[i] = Utf8.Allocate(messages[i].Content);
                }
                UIntPtr needed;
                Status.ThrowUnlessTooSmall(NativeMethods.kvconv_tokenizer_render_chat(
                    Handle, roles, contents, roles.Length, null, UIntPtr.Zero, out needed));
                var text = new byte[(int)needed];
                Status.ThrowIfError(NativeMethods.kvconv_tokenizer_render_chat(
                    Handle, roles, contents, roles.Length, text, needed, out needed));
                return Utf8.Read(text);
            }
            finally
            {
                for (int i = 0; i < roles.Length; ++i)
                {
                    Marshal.FreeHGlobal(roles[i]);
                    Marshal.FreeHGlobal(contents[i]);
                }
            }
        }

        /// <summary>Lets go of the tokenizer; its streams go on.</summary>
        public void Dispose()
        {
            Handle.Dispose();
        }
    }

    /// <summary>Turns ids into pieces of text, each of whole characters.</summary>
    public sealed class TextStream : IDisposable
    {
        private readonly TextStreamHandle handle;

        /// <summary>Begins a text.</summary>
        public TextStream(Tokenizer tokenizer)
        {
            IntPtr created;
            Status.ThrowIfError(NativeMethods.kvconv_text_stream_create(tokenizer.Handle, out created));
            handle = new TextStreamHandle(created);
        }

        /// <summary>Takes one more id and returns the text that is certain now, often empty.</summary>
        public string Push(int tokenId)
        {
            IntPtr text;
            Status.ThrowIfError(NativeMethods.kvconv_text_stream_push(handle, tokenId, out text));
            return Utf8.Read(text);
        }

        /// <summary>Returns the text still held back, and begins anew.</summary>
        public string Flush()
        {
            IntPtr text;
            Status.ThrowIfError(NativeMethods.kvconv_text_stream_flush(handle, out text));
            return Utf8.Read(text);
        }

        /// <summary>Lets go of the stream.</summary>
        public void Dispose()
        {
            handle.Dispose();
        }
    }
}
