"""Report of a run as one page with plots that needs nothing else: no network, no server, no other file.

Pure but for `run.py`, which reads the run's folder. The plots are drawn by uPlot (https://github.com/leeoniya/uPlot,
version 1.6.32, MIT), which is 50 kB and is stored next to the page's template.
"""
