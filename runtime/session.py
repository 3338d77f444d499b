"""A session: one model in ONNX Runtime, run over a `KVCache` through I/O binding.

Keys and values stay where they are; a run takes token ids and gives logits. Everything that can be
refused (op version, provider, graph names, capacity, shapes) is refused before anything runs.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime

from kvconv import memory, names, plan
from kvconv.cache_layout import stored_tensors
from kvconv.errors import BundleError, CacheFullError, KvconvError, ProviderError
from kvconv.flavour import FLAVOURS
from kvconv.manifest import Manifest, Provider
from kvconv.runtime.bundle import Bundle
from kvconv.runtime.decode_step import DecodeStep
from kvconv.runtime.device_cache import DeviceCache
from kvconv.runtime.device_step import DeviceStep
from kvconv.runtime.flavour_check import check_run
from kvconv.runtime.kv_cache import ConcatCache, KVCache, SharedBufferCache
from kvconv.runtime.ort_options import (
    ORT_ERRORS,
    execution_providers,
    reason,
    register_library,
    session_options,
)
from kvconv.runtime.run_arrays import (
    check_out,
    check_token_ids,
    count_positions,
    int64_array,
    int64_of_shape,
)

_NO_GRAPH = -1
"""Of a run that ONNX Runtime neither captures nor replays."""


class Session:
    """A bundle loaded into ONNX Runtime.

    Sessions hold no tokens: each cache is a sequence batch of its own, and runs of different
    caches may interleave.

    Args:
        bundle: The opened bundle.
        threads: Threads of ONNX Runtime's pool, >= 1; None for one per core this process may use.
        provider: `cpu` or `cuda`.
        use_bundle_library: Load the op library that came with the bundle, which is code from
            whoever made the bundle, instead of the installed one.
        profile: Let ONNX Runtime note the time of every node, for a file whose name begins so;
            `end_profile` writes it. None for full speed.
        spin: Whether threads spin while they wait; see `session_options`.
        cuda_graph: Whether decode steps on CUDA are captured, and run as one launch. Takes a graph
            whose operators all have CUDA kernels.

    Raises:
        LibraryError: The op library is absent, too old, or refused by ONNX Runtime.
        ProviderError: The provider is not available here.
        BundleError: The model does not load, or is not what the manifest says.
        NotEnoughMemoryError: The weights are more than is free.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        threads: int | None = None,
        provider: Provider = "cpu",
        use_bundle_library: bool = False,
        profile: Path | None = None,
        spin: bool = True,
        cuda_graph: bool = True,
    ) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads is {threads}; it must be at least 1")
        self.bundle = bundle
        self.manifest = bundle.manifest
        self.provider = provider
        self._device = "cuda" if provider == "cuda" and self.manifest.kernels else None
        self._has_graphs = cuda_graph and self._device is not None
        providers = execution_providers(bundle, provider, cuda_graph=self._has_graphs)
        if provider == "cpu":  # how much a GPU has free, nobody here can tell
            plan.check_weights_fit(plan.bundle_sizes(self.manifest), memory.free_memory_bytes())
        options = session_options(threads, spin=spin)
        if profile is not None:
            options.enable_profiling = True
            options.profile_file_prefix = str(profile)
        register_library(options, bundle, use_bundle_library)
        try:
            self._session = onnxruntime.InferenceSession(
                str(bundle.file(names.MODEL_FILE)), options, providers=providers
            )
        except ORT_ERRORS as error:
            raise BundleError(
                f"ONNX Runtime {onnxruntime.__version__} cannot load {names.MODEL_FILE} of "
                f"{bundle.path}: {reason(error)} {self._load_remedy()}",
                file=names.MODEL_FILE,
            ) from error
        name = providers[0][0]
        if name not in self._session.get_providers():
            raise ProviderError(
                f"ONNX Runtime has {name} but could not start it (are its CUDA and cuDNN "
                f"libraries installed?). Use --provider cpu, or see `kvconv doctor`.",
                provider=provider,
                available=self._session.get_providers(),
            )
        self._check_names()

    def new_cache(
        self, batch_size: int, max_sequence_length: int, *, prefill_chunk: int | None = None
    ) -> KVCache:
        """Make an empty cache of the kind that the bundle's attention takes.

        Args:
            batch_size: Sequences, >= 1.
            max_sequence_length: Capacity in tokens per sequence, >= 1.
            prefill_chunk: Most tokens per row in one run; None for the default.

        Raises:
            CacheFullError: The model cannot hold so many tokens.
            NotEnoughMemoryError: The full cache and what a run takes are more than is free.
        """
        self.check_cache(batch_size, max_sequence_length, prefill_chunk=prefill_chunk)
        arguments = (
            self.manifest.cache_layers,
            batch_size,
            max_sequence_length,
            self._session.io_binding,
        )
        if self._device is not None:
            return DeviceCache(*arguments, device=self._device)
        if not FLAVOURS[self.manifest.attention].shared_buffer:
            return ConcatCache(*arguments)
        has_length = names.PAST_SEQUENCE_LENGTH in self.manifest.inputs
        return SharedBufferCache(*arguments, has_length=has_length)

    def check_cache(
        self, batch_size: int, max_sequence_length: int, *, prefill_chunk: int | None = None
    ) -> None:
        """Refuse a cache that `new_cache` would refuse; allocates nothing.

        Args:
            batch_size: As for `new_cache`.
            max_sequence_length: As for `new_cache`.
            prefill_chunk: As for `new_cache`.

        Raises:
            CacheFullError: The model cannot hold so many tokens.
            NotEnoughMemoryError: The full cache and what a run takes are more than is free.
        """
        if batch_size < 1 or max_sequence_length < 1:
            raise ValueError(
                f"batch_size is {batch_size} and max_sequence_length {max_sequence_length}; both "
                f"must be at least 1"
            )
        check_max_sequence_length(self.manifest, max_sequence_length)
        if self._device is not None:
            return
        # The system backs buffers only as they fill, and would kill the process half-way.
        planned = plan.plan(
            plan.bundle_sizes(self.manifest),
            batch_size=batch_size,
            context=max_sequence_length,
            prefill_chunk=prefill_chunk,
        )
        plan.check_run_fits(planned, memory.free_memory_bytes())

    def run(
        self,
        cache: KVCache,
        input_ids: npt.ArrayLike,
        *,
        attention_mask: npt.ArrayLike | None = None,
        position_ids: npt.ArrayLike | None = None,
        num_logits_to_keep: int = 1,
        out: npt.NDArray[np.float32] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Append tokens to a cache and return the logits of the last ones.

        Args:
            cache: Made by this session; its tokens come before the new ones.
            input_ids: [batch_size, sequence_length] int64, sequence_length >= 1.
            attention_mask: [batch_size, cache.length + sequence_length] int64, 1 = attend;
                column j is cache slot j. None for all ones.
            position_ids: [batch_size, sequence_length] int64. None to count the mask's ones.
            num_logits_to_keep: Logits wanted from the end; 0 for those of all new tokens.
            out: [batch_size, kept, vocab_size] float32, contiguous, to write the logits into;
                None for a new array.

        Returns:
            [batch_size, kept, vocab_size] float32: `out`, or a new array.

        Raises:
            CacheFullError: The tokens do not fit, or are more than a ring takes at once; nothing is
                written and nothing has run.
            FlavourError: The bundle's attention does not take such a run; nothing has run.
        """
        ids = int64_array("input_ids", input_ids)
        if ids.ndim != 2 or ids.shape[0] != cache.batch_size or ids.shape[1] < 1:
            raise ValueError(f"input_ids is {ids.shape}; it must be [{cache.batch_size}, >= 1]")
        extremes = (ids.item(),) if ids.size == 1 else (ids.min(), ids.max())
        check_token_ids("input_ids", extremes, self.manifest.vocab_size)
        if num_logits_to_keep < 0:
            raise ValueError(f"num_logits_to_keep is {num_logits_to_keep}; it must be >= 0")
        batch_size, sequence_length = ids.shape
        cache.check_run(sequence_length)
        total = cache.length + sequence_length
        mask = int64_of_shape(
            "attention_mask",
            np.ones((batch_size, total), np.int64) if attention_mask is None else attention_mask,
            (batch_size, total),
        )
        positions = int64_of_shape(
            "position_ids",
            count_positions(mask, cache.length) if position_ids is None else position_ids,
            ids.shape,
        )
        check_run(self.manifest.attention, mask, positions)
        kept = min(num_logits_to_keep or sequence_length, sequence_length)
        shape = (batch_size, kept, self.manifest.vocab_size)
        logits = np.empty(shape, np.float32) if out is None else out
        check_out("out", logits, shape)

        binding = cache.prepare_run(sequence_length)
        cache.arrays.bind_input(names.INPUT_IDS, ids)
        if names.POSITION_IDS in self.manifest.inputs:
            cache.arrays.bind_input(names.POSITION_IDS, positions)
        cache.arrays.bind_input(names.NUM_LOGITS_TO_KEEP, np.array(num_logits_to_keep, np.int64))
        # As wide as the cache is full: another shape in every run, so the caller's memory serves.
        binding.bind_cpu_input(names.ATTENTION_MASK, mask)
        cache.arrays.bind_output(names.LOGITS, logits)
        self._execute(binding)
        cache.commit_run(sequence_length)
        if out is None:  # no other run writes into this array, and it may be large
            cache.arrays.release_output(names.LOGITS)
        return logits

    def decode_step(
        self,
        cache: KVCache,
        attention_mask: npt.NDArray[np.int64],
        logits: npt.NDArray[np.float32],
    ) -> DecodeStep:
        """Return what runs single tokens behind those in a cache; see `DecodeStep`.

        Args:
            cache: Made by this session, and run at least once with this mask.
            attention_mask: [batch_size, cache.capacity] int64.
            logits: [batch_size, 1, vocab_size] float32, contiguous, for the logits of each step.

        Raises:
            FlavourError: The bundle's attention does not take such steps.
        """
        mask = int64_of_shape("attention_mask", attention_mask, (cache.batch_size, cache.capacity))
        check_out("logits", logits, (cache.batch_size, 1, self.manifest.vocab_size))
        # The last step sees the whole mask; every other one sees where that begins.
        check_run(self.manifest.attention, mask, count_positions(mask, cache.capacity - 1))
        has_positions = names.POSITION_IDS in self.manifest.inputs
        if isinstance(cache, DeviceCache):
            return DeviceStep(
                cache, mask, logits, has_positions=has_positions, execute=self._execute
            )
        return DecodeStep(cache, mask, logits, has_positions=has_positions, execute=self._execute)

    def _execute(self, binding: onnxruntime.IOBinding, graph_id: int = _NO_GRAPH) -> None:
        options = None
        if self._has_graphs:
            options = onnxruntime.RunOptions()
            options.add_run_config_entry("gpu_graph_id", str(graph_id))
        try:
            self._session.run_with_iobinding(binding, options)
        except ORT_ERRORS as error:
            raise KvconvError(
                f"ONNX Runtime failed while running {self.bundle.path}: {reason(error)} The cache "
                f"is as it was; `kvconv inspect --check {self.bundle.path}` checks the files."
            ) from error

    def end_profile(self) -> Path:
        """Write the profile of a session that was made with one, and return the JSON file."""
        return Path(self._session.end_profiling())

    def _load_remedy(self) -> str:
        if self._has_graphs:
            return "If it is about CUDA graphs, use --no-cuda-graph."
        return (
            f"Check the files with `kvconv inspect --check {self.bundle.path}`; if they are whole, "
            f"upgrade onnxruntime or export again."
        )

    def _check_names(self) -> None:
        """The graph must take and give what the manifest says, and what every run binds."""
        takes = [*self._session.get_inputs(), *self._session.get_overridable_initializers()]
        found_inputs = {value.name for value in takes}
        found_outputs = {value.name for value in self._session.get_outputs()}
        required = {names.INPUT_IDS, names.ATTENTION_MASK, names.NUM_LOGITS_TO_KEEP}
        outputs = {names.LOGITS}
        for i, layer in enumerate(self.manifest.cache_layers):
            required |= {names.past(i, tensor.name) for tensor in stored_tensors(layer)}
            outputs |= {names.present(i, tensor.name) for tensor in stored_tensors(layer)}
            if layer.cache_mode == "ring":
                required.add(names.PAST_SEQUENCE_LENGTH)
        wrong = (found_inputs ^ set(self.manifest.inputs)) | (required - found_inputs)
        wrong |= (found_outputs ^ set(self.manifest.outputs)) | (outputs - found_outputs)
        if wrong:
            raise BundleError(
                f"{names.MODEL_FILE} of {self.bundle.path} does not have the inputs and outputs "
                f"that the manifest says; they differ in {', '.join(sorted(wrong))}. Export the "
                f"model again.",
                file=names.MODEL_FILE,
            )


def check_max_sequence_length(manifest: Manifest, max_sequence_length: int) -> None:
    """Refuse a capacity that the model was not exported for.

    Raises:
        CacheFullError: The model cannot hold so many tokens.
    """
    limit = manifest.max_sequence_length
    if max_sequence_length > limit:
        raise CacheFullError(
            f"max_sequence_length is {max_sequence_length}; this bundle of "
            f"{manifest.source.model} holds at most {limit} tokens. Use --max-sequence-length "
            f"{limit} or less, or export the model again with a larger one.",
            needed=max_sequence_length,
            capacity=limit,
        )
