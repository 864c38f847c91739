"""Services of the operating system that every process uses: log lines, the heap."""
