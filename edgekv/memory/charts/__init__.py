"""Charts without a plotting library: drawn once, written as SVG inside HTML, or as PNG where Pillow is installed."""
