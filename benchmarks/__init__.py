"""One page (markdown) and one module per claim about speed."""
