"""Quantized training under other people's trainers: each program saves, may be killed, and resumes bit for bit."""
