"""The activation of a gated MLP: SwiGLU and GeGLU."""
