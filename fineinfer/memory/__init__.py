"""Memory room: elastic buffer, slot allocator, request table, KV pool, KV cache, memory governor.

Only ``elastic_buffer`` and ``kv_pool`` import torch, so the scheduler can count slots without it.
"""
