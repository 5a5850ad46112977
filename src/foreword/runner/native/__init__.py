"""Kernels for CPUs, written as LLVM code at start and compiled for the processor at hand."""
