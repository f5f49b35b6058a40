//! Large tensors over several connections of a link.

use crate::common::{SOON, counting, run_each, values};

#[test]
fn large_tensors_come_whole_over_several_connections() {
    // The smaller number of the two counts.
    let streams = |task| vec![("tcp_streams", if task == 0 { "4" } else { "3" }), ("pool_size", "128MiB")];
    run_each(2, streams, |node, task| {
        const LENGTHS: [usize; 5] = [1, 20_000, 40_000, 300_000, 3_000_001];
        for (step, len) in (1..).zip(LENGTHS) {
            let step = node.step(step).expect("new");
            let (to, from) = (node.edge_to("w", 1 - task, "x"), node.edge_from("w", 1 - task, "x"));
            step.send(&to.expect("an edge"), counting(node, task as f32, len)).expect("sent");
            let got = step.recv(&from.expect("an edge"), SOON).expect("it comes").tensor;
            let got = values(&got);
            assert_eq!(got.len(), len);
            assert!((0..len).all(|at| got[at] == (1 - task) as f32 + at as f32), "{len}");
        }
    });
}
