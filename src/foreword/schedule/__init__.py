"""Who gets how many tokens in the next step: requests, queue, admission, plan, scheduler.

Decides and returns frozen plans; computes nothing, waits for nothing, knows no clock of its own.
"""
