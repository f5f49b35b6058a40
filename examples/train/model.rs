//! The model: a perceptron with two hidden layers, its loss, and its gradient.
//!
//! Images are computed one after the other in a fixed order, so the same weights and images give
//! the same bits in every process.

use crate::data::{CLASSES, Image, PIXELS};
use crate::random::Random;
use std::ops::{Deref, DerefMut};

/// Units of each layer, from the pixels to the digits.
const UNITS: [usize; 4] = [PIXELS, 128, 64, CLASSES];
/// Layers with parameters.
pub const LAYERS: usize = UNITS.len() - 1;
/// Parameter tensors: first the weights of every layer, then the biases of every layer.
pub const TENSORS: usize = 2 * LAYERS;

const WIDEST: usize = 128;
const _: () = assert!(UNITS[0] <= WIDEST && UNITS[1] <= WIDEST && UNITS[2] <= WIDEST && UNITS[3] <= WIDEST);

/// One of the parameter tensors, by its number below [`TENSORS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter(usize);

impl Parameter {
    /// All parameter tensors, in order.
    pub fn all() -> impl Iterator<Item = Parameter> {
        (0..TENSORS).map(Parameter)
    }

    /// Its place in a list of all of them.
    pub fn index(self) -> usize {
        self.0
    }

    /// `w1` for the weights of the first layer, `b1` for its biases, and so on.
    pub fn name(self) -> String {
        let kind = if self.0 < LAYERS { 'w' } else { 'b' };
        format!("{kind}{}", self.0 % LAYERS + 1)
    }

    /// Its dimensions. Weights have a row per input.
    pub fn dims(self) -> Vec<usize> {
        let layer = self.0 % LAYERS;
        match self.0 < LAYERS {
            true => vec![UNITS[layer], UNITS[layer + 1]],
            false => vec![UNITS[layer + 1]],
        }
    }

    /// The number of its values.
    pub fn len(self) -> usize {
        self.dims().iter().product()
    }

    /// Its values before the first step: He's uniform distribution for weights, zeros for biases.
    pub fn initial(self, seed: u64) -> Vec<f32> {
        if self.0 >= LAYERS {
            return vec![0.0; self.len()];
        }
        let limit = (6.0 / UNITS[self.0] as f32).sqrt();
        let mut random = Random::new(seed, self.0 as u64);
        (0..self.len()).map(|_| random.within(limit)).collect()
    }
}

/// The memory of a forward and a backward pass: allocated once, used for every image.
#[derive(Debug)]
pub struct Scratch {
    /// The outputs of each layer; the first are the pixels.
    units: [[f32; WIDEST]; LAYERS + 1],
    /// The derivative of the loss by the inputs of each layer's units.
    deltas: [[f32; WIDEST]; LAYERS + 1],
}

impl Scratch {
    pub fn new() -> Scratch {
        Scratch { units: [[0.0; WIDEST]; LAYERS + 1], deltas: [[0.0; WIDEST]; LAYERS + 1] }
    }

    /// Runs the model on one image; the last layer's outputs are probabilities afterwards.
    fn forward<W: Deref<Target = [f32]>>(&mut self, weights: &[W], image: &Image) {
        self.units[0][..PIXELS].copy_from_slice(&image.pixels);
        for layer in 0..LAYERS {
            let (before, after) = self.units.split_at_mut(layer + 1);
            let inputs = &before[layer][..UNITS[layer]];
            let outputs = &mut after[0][..UNITS[layer + 1]];
            outputs.copy_from_slice(&weights[LAYERS + layer]);
            for (row, input) in weights[layer].chunks_exact(outputs.len()).zip(inputs) {
                add_scaled(outputs, *input, row);
            }
            if layer + 1 < LAYERS {
                outputs.iter_mut().for_each(|x| *x = x.max(0.0));
            }
        }
        softmax(&mut self.units[LAYERS][..CLASSES]);
    }

    /// Adds the gradient of one image, after [`Scratch::forward`] of it, times `scale` to
    /// `gradient`.
    fn backward<W, G>(&mut self, weights: &[W], image: &Image, scale: f32, gradient: &mut [G])
    where
        W: Deref<Target = [f32]>,
        G: DerefMut<Target = [f32]>,
    {
        for (class, delta) in self.deltas[LAYERS][..CLASSES].iter_mut().enumerate() {
            let wanted = if class == image.digit { 1.0 } else { 0.0 };
            *delta = (self.units[LAYERS][class] - wanted) * scale;
        }
        for layer in (0..LAYERS).rev() {
            let (before, after) = self.deltas.split_at_mut(layer + 1);
            let delta = &after[0][..UNITS[layer + 1]];
            let inputs = &self.units[layer][..UNITS[layer]];
            add_scaled(&mut gradient[LAYERS + layer], 1.0, delta);
            for (row, input) in gradient[layer].chunks_exact_mut(delta.len()).zip(inputs) {
                add_scaled(row, *input, delta);
            }
            if layer == 0 {
                return; // Nothing is learned about the pixels.
            }
            let rows = weights[layer].chunks_exact(delta.len());
            for ((input, below), row) in inputs.iter().zip(&mut before[layer]).zip(rows) {
                // The derivative of ReLU: 0 where the unit was off.
                *below = if *input > 0.0 { dot(row, delta) } else { 0.0 };
            }
        }
    }

    /// The cross-entropy of the last forward pass.
    fn loss(&self, digit: usize) -> f32 {
        // A probability that was rounded to 0 would give an infinite loss.
        -self.units[LAYERS][digit].max(f32::MIN_POSITIVE).ln()
    }
}

/// Writes the share of these images in the gradient of the mean loss to `gradient`. The batch has
/// `batch` images. Returns the sum of the losses of these images.
pub fn gradient<'a, W, G>(
    scratch: &mut Scratch,
    weights: &[W],
    images: impl Iterator<Item = &'a Image>,
    batch: usize,
    gradient: &mut [G],
) -> f32
where
    W: Deref<Target = [f32]>,
    G: DerefMut<Target = [f32]>,
{
    gradient.iter_mut().for_each(|tensor| tensor.fill(0.0));
    let scale = 1.0 / batch as f32;
    let mut loss = 0.0;
    for image in images {
        scratch.forward(weights, image);
        loss += scratch.loss(image.digit);
        scratch.backward(weights, image, scale, gradient);
    }
    loss
}

/// The quality of the weights on some images.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Score {
    /// Images that were classified correctly.
    pub right: usize,
    /// Images in all.
    pub images: usize,
    /// The mean cross-entropy.
    pub loss: f64,
}

impl Score {
    /// The share of correctly classified images, from 0 to 1.
    pub fn accuracy(&self) -> f64 {
        self.right as f64 / self.images as f64
    }
}

/// Classifies each image.
pub fn score<W: Deref<Target = [f32]>>(scratch: &mut Scratch, weights: &[W], images: &[Image]) -> Score {
    let mut score = Score { right: 0, images: images.len(), loss: 0.0 };
    for image in images {
        scratch.forward(weights, image);
        score.loss += f64::from(scratch.loss(image.digit));
        let odds = &scratch.units[LAYERS][..CLASSES];
        let best = (0..CLASSES).max_by(|a, b| odds[*a].total_cmp(&odds[*b]));
        score.right += usize::from(best == Some(image.digit));
    }
    score.loss /= images.len() as f64;
    score
}

/// A digest of the weights: 64-bit FNV-1a over the bits of all tensors in order.
pub fn digest<W: Deref<Target = [f32]>>(weights: &[W]) -> u64 {
    let bytes = weights.iter().flat_map(|tensor| tensor.iter()).flat_map(|x| x.to_bits().to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

fn softmax(values: &mut [f32]) {
    let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    values.iter_mut().for_each(|x| *x = (*x - largest).exp());
    let sum: f32 = values.iter().sum();
    values.iter_mut().for_each(|x| *x /= sum);
}

/// `to += scale * from`. Most pixels and about half of the units are 0, so that case is worth its
/// branch.
fn add_scaled(to: &mut [f32], scale: f32, from: &[f32]) {
    if scale == 0.0 {
        return;
    }
    for (to, from) in to.iter_mut().zip(from) {
        *to += scale * from;
    }
}

/// The dot product, in eight sums for vector instructions, in a fixed order.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a_eights, a_rest) = a.as_chunks::<8>();
    let (b_eights, b_rest) = b.as_chunks::<8>();
    let mut sums = [0.0; 8];
    for (a, b) in a_eights.iter().zip(b_eights) {
        for lane in 0..8 {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Digits;

    fn weights(seed: u64) -> Vec<Vec<f32>> {
        Parameter::all().map(|parameter| parameter.initial(seed)).collect()
    }

    fn empty() -> Vec<Vec<f32>> {
        Parameter::all().map(|parameter| vec![0.0; parameter.len()]).collect()
    }

    #[test]
    fn the_parameters_are_named_and_shaped_by_layer() {
        let all: Vec<_> = Parameter::all().map(|p| format!("{}{:?}", p.name(), p.dims())).collect();
        assert_eq!(all, ["w1[64, 128]", "w2[128, 64]", "w3[64, 10]", "b1[128]", "b2[64]", "b3[10]"]);
    }

    #[test]
    fn the_gradient_is_the_slope_of_the_loss() {
        let digits = Digits::load().expect("digits");
        let images = &digits.training[..7];
        let mut weights = weights(1);
        // Biases away from 0, or a wrong bias gradient could hide.
        for bias in &mut weights[LAYERS..] {
            bias.iter_mut().enumerate().for_each(|(i, b)| *b = 0.01 * i as f32);
        }
        let mut scratch = Scratch::new();
        let mut computed = empty();
        gradient(&mut scratch, &weights, images.iter(), images.len(), &mut computed);
        let mut random = Random::new(5, 99);
        let mut checked = 0;
        for tensor in 0..TENSORS {
            for _ in 0..20 {
                let at = random.below(weights[tensor].len());
                let (kept, step) = (weights[tensor][at], 3e-4);
                let mut loss_at = |value| {
                    weights[tensor][at] = value;
                    score(&mut scratch, &weights, images).loss
                };
                let slope = (loss_at(kept + step) - loss_at(kept - step)) / f64::from(2.0 * step);
                weights[tensor][at] = kept;
                let found = f64::from(computed[tensor][at]);
                assert!((slope - found).abs() < 2e-3 + 0.03 * slope.abs(), "{tensor} {at}: {slope} {found}");
                checked += usize::from(found.abs() > 5e-3);
            }
        }
        assert!(checked > 30, "only {checked} of the slopes were not about 0");
    }

    #[test]
    fn the_gradients_of_the_parts_of_a_batch_add_up_to_that_of_the_batch() {
        let digits = Digits::load().expect("digits");
        let (weights, mut scratch) = (weights(2), Scratch::new());
        let [mut whole, mut first, mut second] = [empty(), empty(), empty()];
        gradient(&mut scratch, &weights, digits.training[..9].iter(), 9, &mut whole);
        gradient(&mut scratch, &weights, digits.training[..4].iter(), 9, &mut first);
        gradient(&mut scratch, &weights, digits.training[4..9].iter(), 9, &mut second);
        for tensor in 0..TENSORS {
            for i in 0..whole[tensor].len() {
                assert!((whole[tensor][i] - first[tensor][i] - second[tensor][i]).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn one_changed_bit_changes_the_digest() {
        let mut weights = weights(3);
        let before = digest(&weights);
        weights[4][0] = f32::from_bits(weights[4][0].to_bits() ^ 1);
        assert_ne!(digest(&weights), before);
    }

    #[test]
    fn the_dot_product_covers_lengths_that_are_no_multiple_of_eight() {
        let a: Vec<f32> = (1..=10).map(|x| x as f32).collect();
        assert_eq!(dot(&a, &a), 385.0);
        assert_eq!(dot(&a[..3], &a[..3]), 14.0);
    }

    #[test]
    fn huge_outputs_do_not_make_the_loss_infinite() {
        let mut values = [1e30, -1e30, 0.0];
        softmax(&mut values);
        assert_eq!(values, [1.0, 0.0, 0.0]);
    }
}
