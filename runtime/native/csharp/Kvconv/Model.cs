using System;
using System.Runtime.InteropServices;

namespace Kvconv
{
    /// <summary>How a model is opened; null paths are searched for.</summary>
    public sealed class ModelOptions
    {
        /// <summary>Of ONNX Runtime's pool; 0: a thread per core.</summary>
        public int Threads { get; set; }

        /// <summary>Threads sleep while they wait.</summary>
        public bool NoSpin { get; set; }

        /// <summary>Run the op library that lies in the bundle, which is code from whoever made it.</summary>
        public bool UseBundleLibrary { get; set; }

        /// <summary>Path of ONNX Runtime, a file or a folder.</summary>
        public string OnnxRuntimeLibrary { get; set; }

        /// <summary>Path of kvconv's op library.</summary>
        public string OpLibrary { get; set; }
    }

    /// <summary>A bundle that is loaded; any number of threads may use it.</summary>
    public sealed class Model : IDisposable
    {
        /// <summary>Opens the folder that `kvconv export` wrote.</summary>
        public Model(string bundle, ModelOptions options = null)
        {
            if (options == null)
            {
                options = new ModelOptions();
            }
            var raw = new NativeMethods.ModelOptionsRaw
            {
                StructSize = (uint)Marshal.SizeOf(typeof(NativeMethods.ModelOptionsRaw)),
                AbiVersion = NativeMethods.AbiVersion,
                Threads = options.Threads,
                NoSpin = options.NoSpin ? 1 : 0,
                UseBundleLibrary = options.UseBundleLibrary ? 1 : 0
            };
            try
            {
                if (options.OnnxRuntimeLibrary != null)
                {
                    raw.OnnxRuntimeLibrary = Utf8.Allocate(options.OnnxRuntimeLibrary);
                }
                if (options.OpLibrary != null)
                {
                    raw.OpLibrary = Utf8.Allocate(options.OpLibrary);
                }
                IntPtr handle;
                Status.ThrowIfError(NativeMethods.kvconv_model_open(Utf8.Write(bundle), ref raw, out handle));
                Handle = new ModelHandle(handle);
            }
            finally
            {
                Marshal.FreeHGlobal(raw.OnnxRuntimeLibrary);
                Marshal.FreeHGlobal(raw.OpLibrary);
            }
        }

        internal ModelHandle Handle { get; }

        /// <summary>Width of the logits: token ids are below it.</summary>
        public int VocabSize
        {
            get { return GetInfo().VocabSize; }
        }

        /// <summary>Most tokens, prompt and new, of one generator.</summary>
        public int MaxSequenceLength
        {
            get { return GetInfo().MaxSequenceLength; }
        }

        /// <summary>Lets go of the model; its generators go on.</summary>
        public void Dispose()
        {
            Handle.Dispose();
        }

        private NativeMethods.ModelInfoRaw GetInfo()
        {
            var info = new NativeMethods.ModelInfoRaw
            {
                StructSize = (uint)Marshal.SizeOf(typeof(NativeMethods.ModelInfoRaw))
            };
            Status.ThrowIfError(NativeMethods.kvconv_model_get_info(Handle, ref info));
            return info;
        }
    }
}
