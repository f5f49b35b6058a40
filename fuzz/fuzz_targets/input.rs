//! The bytes of a program, taken one after the other. Where they end, there are zeros.

/// The rest of the input.
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    /// The next byte, if there is one.
    pub fn byte(&mut self) -> Option<u8> {
        let (byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*byte)
    }

    pub fn u8(&mut self) -> u8 {
        self.byte().unwrap_or(0)
    }

    pub fn flag(&mut self) -> bool {
        self.u8() & 1 != 0
    }

    /// A number below `count`.
    pub fn below(&mut self, count: usize) -> usize {
        usize::from(self.u8()) % count.max(1)
    }

    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.u8()))
    }

    /// A number that is small, near the end of its range, or anything.
    pub fn number(&mut self) -> u64 {
        match self.u8() {
            small @ 0..=200 => u64::from(small % 8),
            near @ 201..=220 => u64::MAX - u64::from(near - 201),
            _ => self.u64(),
        }
    }

    /// Up to 255 bytes, or, with a length of 255, up to 5,000.
    pub fn bytes(&mut self) -> &'a [u8] {
        let len = match self.u8() {
            u8::MAX => 5000,
            len => usize::from(len),
        };
        let (bytes, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        bytes
    }
}
