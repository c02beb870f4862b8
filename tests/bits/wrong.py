"""A sum whose order depends on the vector width and on the number of threads."""

import numpy as np

from afinar.autograd import get_num_threads, launch

parts = launch.VECTOR_WIDTH * get_num_threads()
for x in np.random.default_rng(0).standard_normal((20, 1024)).astype(np.float32):
    total = np.float32(0)
    for part in x.reshape(-1, parts).T:
        s = np.float32(0)
        for value in part:
            s += value
        total += s
    print(total.tobytes().hex())
