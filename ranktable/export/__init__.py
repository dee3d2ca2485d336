"""Rank tables as the files and commands of other launchers, one module per family of formats.

None of them can hold a whole rank table: `export_table` says what was left out. A new format is an `Exporter` in a
module of this folder, and one line in `ranktable.export.exporter`.
"""
