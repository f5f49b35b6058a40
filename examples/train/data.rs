//! The handwritten digits: read, scaled and split.

use std::fmt;

/// Pixels of an image.
pub const PIXELS: usize = 64;
/// Kinds of images: the digits 0 to 9.
pub const CLASSES: usize = 10;

/// The largest value of a pixel in the file.
const WHITE: f32 = 16.0;
/// One image in this many is held out.
const HELD_OUT: usize = 5;

static DIGITS: &str = include_str!("data/digits.csv");

/// An image and its digit.
#[derive(Clone, Debug)]
pub struct Image {
    /// Row by row, from 0 to 1.
    pub pixels: [f32; PIXELS],
    /// 0 to 9.
    pub digit: usize,
}

/// All images in two parts: every fifth image is held out.
#[derive(Debug)]
pub struct Digits {
    /// Images for the training.
    pub training: Vec<Image>,
    /// Images for measuring the accuracy. The sizes and rates of the example were chosen with them,
    /// so the accuracy is slightly optimistic.
    pub held_out: Vec<Image>,
}

/// A line that could not be parsed.
#[derive(Debug, PartialEq, Eq)]
pub struct BadLine {
    line: usize,
    why: String,
}

impl fmt::Display for BadLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {} of the digits is no image: {}", self.line, self.why)
    }
}

impl std::error::Error for BadLine {}

impl Digits {
    /// The images that are built into this program.
    pub fn load() -> Result<Digits, BadLine> {
        Digits::parse(DIGITS)
    }

    fn parse(text: &str) -> Result<Digits, BadLine> {
        let mut digits = Digits { training: Vec::new(), held_out: Vec::new() };
        for (index, line) in text.lines().enumerate() {
            let image = image(line).map_err(|why| BadLine { line: index + 1, why })?;
            let part = match index % HELD_OUT == HELD_OUT - 1 {
                true => &mut digits.held_out,
                false => &mut digits.training,
            };
            part.push(image);
        }
        Ok(digits)
    }
}

fn image(line: &str) -> Result<Image, String> {
    let mut numbers = line.split(',');
    let mut next = |allowed: u8| {
        let text = numbers.next().ok_or_else(|| format!("it has fewer than {} numbers", PIXELS + 1))?;
        let number: Option<u8> = text.parse().ok().filter(|number| *number <= allowed);
        number.ok_or_else(|| format!("`{text}` is no number from 0 to {allowed}"))
    };
    let mut pixels = [0.0; PIXELS];
    for pixel in &mut pixels {
        *pixel = f32::from(next(WHITE as u8)?) / WHITE;
    }
    let digit = usize::from(next(CLASSES as u8 - 1)?);
    match numbers.next() {
        Some(_) => Err(format!("it has more than {} numbers", PIXELS + 1)),
        None => Ok(Image { pixels, digit }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_has_1797_images_of_which_every_fifth_is_held_out() {
        let digits = Digits::load().expect("digits");
        assert_eq!((digits.training.len(), digits.held_out.len()), (1438, 359));
        let all = digits.training.iter().chain(&digits.held_out);
        let mut each = [0; CLASSES];
        for image in all {
            each[image.digit] += 1;
            assert!(image.pixels.iter().all(|pixel| (0.0..=1.0).contains(pixel)));
        }
        // The counts that scikit-learn documents.
        assert_eq!(each, [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]);
    }

    #[test]
    fn the_first_image_is_the_zero_of_the_file() {
        let digits = Digits::load().expect("digits");
        let first = &digits.training[0];
        assert_eq!(first.digit, 0);
        assert_eq!(first.pixels[2..6], [5.0 / 16.0, 13.0 / 16.0, 9.0 / 16.0, 1.0 / 16.0]);
    }

    #[test]
    fn a_line_that_is_no_image_is_refused_with_its_number() {
        let good = DIGITS.lines().next().expect("line");
        let refusal = |bad: &str| {
            let text = format!("{good}\n{bad}\n");
            Digits::parse(&text).expect_err("bad line").to_string()
        };
        assert!(refusal("1,2").contains("line 2"), "{}", refusal("1,2"));
        assert!(refusal("1,2").contains("fewer"));
        assert!(refusal(&format!("{good},1")).contains("more than 65"));
        assert!(refusal(&good.replacen("13", "17", 1)).contains("`17` is no number from 0 to 16"));
    }
}
