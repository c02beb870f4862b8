"""Transformer blocks and whole models, their files, and generation."""

from .apr import load_apr, save_apr
from .config import TransformerConfig
from .decoder import Decoder, DecoderConfig, preset
from .generate import generate, stream
from .hf import load_pretrained, save_pretrained
from .init import lock_init_seed
from .llama import Transformer
from .module import Module
