"""Tests mirror the modules of `src/foreword`, beside `architecture`, `parity` and `journeys`."""
