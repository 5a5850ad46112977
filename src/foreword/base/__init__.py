"""Words shared by every room: ids, errors, sampling parameters and configuration.

Knows nothing of caches, schedules, tensors or sockets, and imports only the standard library.
"""
