"""Pictures of a schedule, a simulated and a measured timeline, all by one renderer: text, SVG and Perfetto trace."""
