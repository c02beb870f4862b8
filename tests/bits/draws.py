"""A digest of what no op of the registry shows: random numbers and sums for norms and losses."""

import hashlib

import numpy as np

from afinar.autograd import random
from afinar.autograd.ops.reduce import sum_in_blocks, sum_of_squares

key = random.make_key("bits", 0)
x = random.normal(key, (50_003,))
for name, value in {
    "words": random.raw_words(key, 50_003),
    "uniform": random.uniform(key, (50_003,), -0.1, 0.3),
    "normal": x,
    "permutation": random.permutation(key, 50_003),
    "squares": sum_of_squares(x),
    "squares64": sum_of_squares(x.astype(np.float64) / 3),
    "blocks": sum_in_blocks(x.astype(np.float64)),
}.items():
    print(name, hashlib.sha256(np.asarray(value).tobytes()).hexdigest())
