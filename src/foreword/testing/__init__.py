"""Fakes for the sockets, a naive cache to compare with, and checks; for tests of the heart, here and in your code."""
