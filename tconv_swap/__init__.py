"""tconv-swap: swap every ``nn.ConvTranspose2d`` of a network for a faster one that computes the same."""
