"""What the compiled kernels' functions take and return, as ctypes has it."""

import ctypes

_Pointer = ctypes.c_void_p
_Int = ctypes.c_int
_Size = ctypes.c_int64
_Float = ctypes.c_float
SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "shoal_instructions": (ctypes.c_char_p, []),
    "shoal_packed_elements": (_Size, [_Int, _Size, _Size]),
    "shoal_pack": (None, [_Int, _Pointer, _Pointer, _Size, _Size]),
    "shoal_linear": (
        _Int,
        [
            *[_Int] * 2,
            *[_Pointer] * 2,
            *[_Size] * 2,
            _Int,
            _Size,
            _Pointer,
            _Int,
            _Pointer,
            _Size,
            _Pointer,
            _Size,
        ],
    ),
    "shoal_format_bytes": (_Size, [_Int, _Int, _Size, _Size, _Size]),
    "shoal_row_bytes": (_Size, [_Int, _Int, _Size, _Size]),
    "shoal_rms_norm": (None, [_Int, _Pointer, _Pointer, _Float, _Size, _Size, _Pointer]),
    "shoal_rotate_and_write": (
        _Int,
        [_Int, *[_Pointer] * 3, _Float, _Pointer, _Size, *[_Pointer] * 3],
    ),
    "shoal_attention": (_Int, [_Int, _Int, *[_Pointer] * 6]),
    "shoal_sample": (_Int, [_Int, _Pointer, _Size, _Size, _Pointer, _Pointer]),
    "shoal_mask": (_Int, [_Int, _Pointer, _Size, _Pointer, _Size, _Pointer]),
    "shoal_plan_create": (
        _Pointer,
        [_Int, _Pointer, _Size, _Pointer, _Size, _Pointer, _Size],
    ),
    "shoal_plan_run": (_Int, [_Pointer, _Pointer]),
    "shoal_plan_destroy": (None, [_Pointer]),
}
