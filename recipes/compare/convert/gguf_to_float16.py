"""Write a GGUF file again with its matrices in float16, its vectors in float32. Usage: IN OUT."""

import sys

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

_MADE_BY_THE_WRITER = ("general.architecture", "general.file_type", "general.quantization_version")
_MOSTLY_F16 = 1

reader = GGUFReader(sys.argv[1])
writer = GGUFWriter(sys.argv[2], reader.fields["general.architecture"].contents())
for name, field in reader.fields.items():
    if name in _MADE_BY_THE_WRITER or name.startswith("GGUF."):
        continue
    kind = field.types[0]
    item_kind = field.types[-1] if kind == GGUFValueType.ARRAY else None
    writer.add_key_value(name, field.contents(), kind, sub_type=item_kind)
writer.add_file_type(_MOSTLY_F16)
for tensor in reader.tensors:
    shape = [int(size) for size in reversed(tensor.shape)]
    values = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    is_matrix = values.ndim > 1
    writer.add_tensor(
        tensor.name,
        np.ascontiguousarray(values, np.float16 if is_matrix else np.float32),
        raw_dtype=GGMLQuantizationType.F16 if is_matrix else GGMLQuantizationType.F32,
    )
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
