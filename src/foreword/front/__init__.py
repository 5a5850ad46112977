"""Text in, text out: checks what is asked, tokenises and hashes it, submits it, and turns tokens back into text.

Knows no HTTP and no model; every face (server, library, command line) goes through `front.Front`.
"""
