using System;
using System.Runtime.InteropServices;
using System.Text;

namespace Kvconv
{
    /// <summary>Why a call failed; the numbers of kvconv.h.</summary>
    public enum ErrorCode
    {
        /// <summary>A value is out of range.</summary>
        InvalidArgument = 1,
        /// <summary>Destroyed, or of another kind.</summary>
        InvalidHandle = 2,
        /// <summary>Binding and library do not belong together.</summary>
        AbiMismatch = 3,
        /// <summary>The bundle is missing, damaged, or of a newer format.</summary>
        BundleError = 4,
        /// <summary>ONNX Runtime, the op library or the tokenizer library.</summary>
        LibraryError = 5,
        /// <summary>More tokens than the cache takes; nothing has run.</summary>
        CacheFull = 6,
        /// <summary>Nothing was allocated.</summary>
        NotEnoughMemory = 7,
        /// <summary>A ring no longer holds what the rest would see.</summary>
        RewindError = 8,
        /// <summary>A prompt is empty, or there is no chat template for it.</summary>
        PromptError = 9,
        /// <summary>Another thread uses the object now.</summary>
        Busy = 10,
        /// <summary>The caller's buffer is too small.</summary>
        BufferTooSmall = 11,
        /// <summary>ONNX Runtime failed in a run, or logits are not numbers.</summary>
        Failed = 12
    }

    /// <summary>A failure: what was wrong and what to do.</summary>
    public sealed class KvconvException : Exception
    {
        internal KvconvException(int code, string message) : base(message)
        {
            Code = (ErrorCode)code;
        }

        /// <summary>Why.</summary>
        public ErrorCode Code { get; }
    }

    internal static class Status
    {
        internal static void ThrowIfError(int status)
        {
            if (status != 0)
            {
                throw new KvconvException(status, Utf8.Read(NativeMethods.kvconv_last_error()));
            }
        }

        /// <summary>As ThrowIfError, for a call that asks how large a buffer must be.</summary>
        internal static void ThrowUnlessTooSmall(int status)
        {
            if (status != (int)ErrorCode.BufferTooSmall)
            {
                ThrowIfError(status);
            }
        }
    }

    internal static class Utf8
    {
        /// <summary>Returns UTF-8 with a zero byte; null for null.</summary>
        internal static byte[] Write(string text)
        {
            return text == null ? null : Encoding.UTF8.GetBytes(text + "\0");
        }

        internal static string Read(IntPtr text)
        {
            int length = 0;
            while (Marshal.ReadByte(text, length) != 0)
            {
                ++length;
            }
            byte[] bytes = new byte[length];
            Marshal.Copy(text, bytes, 0, length);
            return Encoding.UTF8.GetString(bytes);
        }

        /// <summary>Returns the text of a buffer that ends with a zero byte.</summary>
        internal static string Read(byte[] buffer)
        {
            return Encoding.UTF8.GetString(buffer, 0, buffer.Length - 1);
        }

        /// <summary>Copies a text to native memory, which the caller frees with Marshal.FreeHGlobal.</summary>
        internal static IntPtr Allocate(string text)
        {
            byte[] bytes = Write(text);
            IntPtr memory = Marshal.AllocHGlobal(bytes.Length);
            Marshal.Copy(bytes, 0, memory, bytes.Length);
            return memory;
        }
    }
}
