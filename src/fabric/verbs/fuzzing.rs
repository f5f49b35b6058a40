//! Entry points of fuzz targets for code that reads a peer's bytes. Each function checks properties
//! that hold for any input.

use super::address::LinkAddress;
use super::control::{BYTES, ControlMessage, ControlWindow, WINDOW};
use super::stripes::MAX_STRIPES;

const MAX_ERROR: usize = 512;

fn is_short(why: &dyn std::fmt::Display) {
    assert!(why.to_string().len() <= MAX_ERROR, "{why}");
}

/// An address: reading and writing it gives the same bytes, each word lies inside its tables, and
/// an end finds its own rails.
pub fn address(bytes: &[u8]) {
    let mut end = match LinkAddress::from_bytes(bytes) {
        Ok(end) => end,
        Err(why) => return is_short(&why),
    };
    assert_eq!(end.to_bytes(), bytes);
    assert!(end.depth > 0);
    let own = end.clone();
    for rail in &mut end.rails {
        assert!(rail.stripes() <= MAX_STRIPES && rail.reads > 0);
        assert!(rail.pairs.iter().all(|(number, psn)| number.max(psn) >> 24 == 0));
        rail.totals();
        let fewer = rail.stripes() / 2;
        rail.keep_stripes(fewer);
        assert_eq!((rail.stripes(), rail.pairs.len()), (fewer, 2 + usize::from(fewer)));
    }
    assert_eq!(LinkAddress::from_bytes(&end.to_bytes()).expect("with fewer stripes"), end);
    // The number of stripes may differ. All other differences are reported.
    let most = end.rails.len().min(end.most_rails.into());
    assert_eq!(own.common(&end).expect("its own rails").len(), most);
    end.generation ^= 1;
    is_short(&own.common(&end).expect_err("another generation"));
}

/// Control messages one after the other; before each the first of its bytes says how many this side
/// sends.
pub fn control(bytes: &[u8]) {
    let (mut window, mut outstanding) = (ControlWindow::default(), 0);
    for message in bytes.as_chunks::<{ BYTES + 1 }>().0 {
        let [sends, message @ ..] = *message;
        for _ in 0..sends % 8 {
            if window.has_room() {
                window.sent();
                outstanding += 1;
            }
        }
        assert!(outstanding <= WINDOW);
        let before = window.acknowledged;
        match window.receive(message) {
            Ok(ControlMessage::Disconnect(why)) => is_short(&why),
            Ok(_) => {}
            Err(why) => is_short(&why),
        }
        // However many the peer acknowledges, it is never more than were sent.
        outstanding -= window.acknowledged.wrapping_sub(before);
        assert!(outstanding <= WINDOW);
    }
}
