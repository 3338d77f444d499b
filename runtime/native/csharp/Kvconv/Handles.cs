using System;
using System.Runtime.InteropServices;

namespace Kvconv
{
    /// <summary>Owns a native object, also when an exception or a forgotten Dispose leaves it behind.</summary>
    internal abstract class NativeHandle : SafeHandle
    {
        protected NativeHandle(IntPtr value) : base(IntPtr.Zero, true)
        {
            SetHandle(value);
        }

        public override bool IsInvalid
        {
            get { return handle == IntPtr.Zero; }
        }
    }

    internal sealed class ModelHandle : NativeHandle
    {
        internal ModelHandle(IntPtr value) : base(value) { }

        protected override bool ReleaseHandle()
        {
            NativeMethods.kvconv_model_destroy(handle);
            return true;
        }
    }

    internal sealed class GeneratorHandle : NativeHandle
    {
        internal GeneratorHandle(IntPtr value) : base(value) { }

        protected override bool ReleaseHandle()
        {
            NativeMethods.kvconv_generator_destroy(handle);
            return true;
        }
    }

    internal sealed class TokenizerHandle : NativeHandle
    {
        internal TokenizerHandle(IntPtr value) : base(value) { }

        protected override bool ReleaseHandle()
        {
            NativeMethods.kvconv_tokenizer_destroy(handle);
            return true;
        }
    }

    internal sealed class TextStreamHandle : NativeHandle
    {
        internal TextStreamHandle(IntPtr value) : base(value) { }

        protected override bool ReleaseHandle()
        {
            NativeMethods.kvconv_text_stream_destroy(handle);
            return true;
        }
    }
}
