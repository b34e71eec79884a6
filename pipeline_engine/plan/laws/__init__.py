"""The laws of a schedule, one idea a file; ``check`` asks them all."""
