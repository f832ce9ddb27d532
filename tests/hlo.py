"""Matrix products in the text of a compiled program."""

import re


def shapes_of(text):
    """Shape of every value in an HLO text, by name."""
    return dict(re.findall(r"%?([\w.-]+) = \w+\[([\d,]*)\]", text))


def vocabulary_gemms(text, size):
    """Matrix products with an operand or a result as large as the vocabulary."""
    shapes, count = shapes_of(text), 0
    for name, operands in re.findall(r"%?([\w.-]+) = [^\n]*? dot\(([^)]*)\)", text):
        names = [name, *re.findall(r"%([\w.-]+)", operands)]
        count += any(str(size) in shapes.get(n, "").split(",") for n in names)
    return count
