"""The measurements of ``bench_engines.py`` on ranks: seconds, bytes held, bytes sent, bytes gathered, growth."""
