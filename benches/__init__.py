"""Speed and memory, always as ratios measured side by side in one run."""

import os

# Idle threads of OpenBLAS spin for a tenth of a second and keep a core from whoever is next; with
# this they sleep after 2**20 cycles, well within the pause between two turns. Read at its start.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "20")
