"""Tools and studies that only the command line imports."""
