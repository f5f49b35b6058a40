//! Writing protobuf's encoding. A message is described once, as calls into a [`Sink`]: one sink counts its bytes, the other
//! writes them, so that they can't disagree.

/// Wire types.
pub(super) const VARINT: u32 = 0;
pub(super) const COUNTED: u32 = 2;

/// Takes the parts of a message in order.
pub(super) trait Sink {
    /// Bytes as they are.
    fn put(&mut self, bytes: &[u8]);

    /// A message inside this one, in this field.
    fn message(&mut self, field: u32, body: &dyn Fn(&mut dyn Sink));
}

/// A field with a number; none where it is 0, which is what a field that is missing means.
pub(super) fn number(sink: &mut dyn Sink, field: u32, value: u64) {
    if value != 0 {
        varint(sink, u64::from(field << 3 | VARINT));
        varint(sink, value);
    }
}

/// A field with bytes, also where there are none: an element of a repeated field.
pub(super) fn counted(sink: &mut dyn Sink, field: u32, bytes: &[u8]) {
    head(sink, field, bytes.len() as u64);
    sink.put(bytes);
}

/// A field with bytes; none where there are no bytes, which is what a field that is missing means.
pub(super) fn optional(sink: &mut dyn Sink, field: u32, bytes: &[u8]) {
    if !bytes.is_empty() {
        counted(sink, field, bytes);
    }
}

fn head(sink: &mut dyn Sink, field: u32, len: u64) {
    varint(sink, u64::from(field << 3 | COUNTED));
    varint(sink, len);
}

fn varint(sink: &mut dyn Sink, mut value: u64) {
    let mut bytes = [0; 10];
    let mut len = 0;
    loop {
        bytes[len] = value as u8 & 0x7f;
        value >>= 7;
        if value == 0 {
            return sink.put(&bytes[..=len]);
        }
        bytes[len] |= 0x80;
        len += 1;
    }
}

/// Bytes of a message; `u64::MAX` if they are not to be counted.
pub(super) fn count(body: &dyn Fn(&mut dyn Sink)) -> u64 {
    let mut count = Count(0);
    body(&mut count);
    count.0
}

/// Writes a message to `out`, which must have as many bytes as [`count`] says.
pub(super) fn fill(out: &mut [u8], body: &dyn Fn(&mut dyn Sink)) {
    let mut fill = Fill { rest: out };
    body(&mut fill);
    assert!(fill.rest.is_empty(), "a message is written as it was counted");
}

struct Count(u64);

impl Sink for Count {
    fn put(&mut self, bytes: &[u8]) {
        self.0 = self.0.saturating_add(bytes.len() as u64);
    }

    fn message(&mut self, field: u32, body: &dyn Fn(&mut dyn Sink)) {
        let len = count(body);
        head(self, field, len);
        self.0 = self.0.saturating_add(len);
    }
}

struct Fill<'a> {
    rest: &'a mut [u8],
}

impl Sink for Fill<'_> {
    fn put(&mut self, bytes: &[u8]) {
        let (here, rest) = std::mem::take(&mut self.rest).split_at_mut(bytes.len());
        here.copy_from_slice(bytes);
        self.rest = rest;
    }

    fn message(&mut self, field: u32, body: &dyn Fn(&mut dyn Sink)) {
        head(self, field, count(body));
        body(self);
    }
}
