"""The functions of cuBLAS that the engine calls, on the memory of the CPU, as strict as CuPy's.

Matrices are held by columns. As in CuPy 14.2 the type of the sums is given as that of data.
"""

import ctypes

import numpy as np

_DTYPES = {0: np.float32, 1: np.float64, 2: np.float16, 14: np.uint16}
_SUMS = {(0, 0): 0, (1, 1): 1, (2, 0): 0, (14, 0): 0}  # (operands, result): type of the sums


class CUBLASError(RuntimeError):
    """A status other than success."""


def gemmEx(handle, transa, transb, m, n, k, alpha, A, Atype, lda, B, Btype, ldb, beta, C, Ctype,  # noqa: N802
           ldc, computeType, algo):  # fmt: skip
    gemmStridedBatchedEx(handle, transa, transb, m, n, k, alpha, A, Atype, lda, 0, B, Btype, ldb, 0,
                         beta, C, Ctype, ldc, 0, 1, computeType, algo)  # fmt: skip


def gemmStridedBatchedEx(handle, transa, transb, m, n, k, alpha, A, Atype, lda, strideA, B, Btype,  # noqa: N802
                         ldb, strideB, beta, C, Ctype, ldc, strideC, batchCount, computeType,
                         algo):  # fmt: skip
    whole = (handle, transa, transb, m, n, k, alpha, A, Atype, lda, strideA, B, Btype, ldb, strideB,
             beta, C, Ctype, ldc, strideC, batchCount, computeType, algo)  # fmt: skip
    if not all(isinstance(x, int | np.integer) for x in whole):
        raise TypeError("an integer is required")
    if max(m, n, k, lda, ldb, ldc, batchCount) >= 2**31:
        raise OverflowError("value too large to convert to int")
    if Atype != Btype or _SUMS.get((Atype, Ctype)) != computeType or algo != -1:
        raise CUBLASError("CUBLAS_STATUS_NOT_SUPPORTED")
    rows_a, rows_b = (k if transa else m), (n if transb else k)
    if min(m, n, k) < 0 or lda < max(1, rows_a) or ldb < max(1, rows_b) or ldc < max(1, m):
        raise CUBLASError("CUBLAS_STATUS_INVALID_VALUE")
    real = _DTYPES[computeType]
    alpha, beta = (_at(p, (1,), real, (0,))[0] for p in (alpha, beta))
    for batch in range(batchCount):
        a = _matrix(A, batch * strideA, rows_a, m if transa else k, lda, Atype)
        b = _matrix(B, batch * strideB, rows_b, k if transb else n, ldb, Btype)
        c = _matrix(C, batch * strideC, m, n, ldc, Ctype)
        product = alpha * (_number(a.T if transa else a) @ _number(b.T if transb else b))
        c[...] = product if beta == 0 else product + beta * c


def _matrix(address, offset, rows, columns, ld, kind):
    size = np.dtype(_DTYPES[kind]).itemsize
    return _at(address + offset * size, (rows, columns), _DTYPES[kind], (size, ld * size))


def _at(address, shape, dtype, strides):
    if 0 in shape:
        return np.empty(shape, dtype)
    extent = sum((s - 1) * step for s, step in zip(shape, strides, strict=True))
    memory = (ctypes.c_char * (extent + np.dtype(dtype).itemsize)).from_address(address)
    return np.ndarray(shape, dtype, memory, strides=strides)


def _number(x):
    if x.dtype == np.uint16:
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32) if x.dtype == np.float16 else x
