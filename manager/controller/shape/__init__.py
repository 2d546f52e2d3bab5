"""Choosing, placing and forming the shape in which workers train."""
