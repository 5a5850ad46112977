"""The loop: plan, launch, land, commit; its three sockets; the thread around it; the way in and out.

Knows no tensors and no HTTP. Everything it touches beyond the heart comes through `sockets`.
"""
