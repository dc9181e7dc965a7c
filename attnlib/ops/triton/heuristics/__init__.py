"""Tile shapes and split counts: pure functions of sizes and device limits, fed by the tables in `tables/`."""
