"""Trainers of our own in the shapes that ART's private code has had: guard, order of calls, kinds of records.

july.py          2026-07: no guard, functions beside the class, sentinels on outputs, windows of one item
september.py     2026-09: refuses several stages, gradients on and off within one plan, fields beyond the tensors
publisher.py     what ART publishes a slot by, over july.py
graph_cache.py   newer: a group's graph stays inside, its outputs leave as copies
"""
