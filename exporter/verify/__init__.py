"""Plan, truth, run, compare, report: the parts of a verification, each a file of its own.

`subject` joins them; `exporter.api.verify` shows the whole way.
"""
