"""The operations, one family per file."""

from . import attention_gpu, gemm_gpu
from .activation import gelu, silu, swiglu
from .attention import attention
from .dropout import dropout
from .elementwise import (
    add,
    cast,
    div,
    exp,
    log,
    maximum,
    mul,
    neg,
    pow,
    relu,
    sigmoid,
    sqrt,
    sub,
    tanh,
    where,
)
from .embedding import embedding
from .loss import cross_entropy, linear_cross_entropy
from .matmul import linear, matmul
from .norm import layer_norm, rms_norm
from .reduce import logsumexp, max, mean, sum
from .rope import rope, rope_table
from .shape import broadcast_to, concat, getitem, permute, reshape, stack, swapaxes
from .softmax import log_softmax, softmax
