"""What a recipe may ask of training besides the cross-entropy: R-Drop, distillation, other optimizers."""
