//! The explored cases.

use super::UNSERVED;
use super::case::{Act, Case};
use crate::protocol::WindowOptions;

fn options(window: u64) -> WindowOptions {
    WindowOptions {
        first_window: window,
        usual_window: window,
        largest_window: window,
        max_cells: 1000,
        max_edges: 4,
        kept_edges: 3,
        max_needs: 8,
        resends: false,
    }
}

pub fn cases() -> Vec<Case> {
    use Act::*;
    let mut cases = Vec::new();
    let mut add = |name, options, programs: Vec<Vec<Act>>| cases.push(Case { name, options, programs });
    // Three quarters of the cells are enough for one edge to grow, or for none.
    for max_cells in [4, 2] {
        add(
            "windows grow into three quarters of the cells",
            WindowOptions { usual_window: 2, largest_window: 2, max_cells, ..options(1) },
            vec![
                vec![Send(0, 1), Send(1, 1), Send(0, 1)],
                vec![Receive(0, 1), Receive(0, 1)],
                vec![Receive(1, 1)],
            ],
        );
    }
    // No edge has a window, so each value is needed.
    let one_need = WindowOptions { max_cells: 0, max_needs: 1, ..options(1) };
    add(
        "more receives than values that may be needed",
        one_need,
        vec![
            vec![Send(0, 1), Send(1, 1), Send(0, 2)],
            vec![Receive(0, 2), Receive(1, 1)],
            vec![TryReceive(0, 1), Receive(0, 1)],
        ],
    );
    add(
        "more receives than values that may be needed, and steps end",
        one_need,
        vec![
            vec![Send(0, 1), Send(1, 1), End(3)],
            vec![Receive(0, 2), Receive(0, 3), EndHere(2)],
            vec![Receive(1, 1), Receive(UNSERVED, 1), Receive(0, 1)],
        ],
    );
    add(
        "more receives than values that may be needed, and a return",
        one_need,
        vec![vec![Send(0, 1), Send(1, 1), SenderReturns, Send(0, 1)], vec![Receive(0, 1), Receive(1, 1)]],
    );
    add(
        "more receives than values that may be needed, and a repair",
        WindowOptions { resends: true, ..one_need },
        vec![
            vec![Send(0, 1), Send(1, 1)],
            vec![Receive(0, 1), Receive(1, 1)],
            vec![Break, SenderRepaired],
            vec![ReceiverRepaired],
        ],
    );
    for window in [1, 2] {
        let plain = options(window);
        add("one value", plain, vec![vec![Send(0, 1)], vec![Receive(0, 1)]]);
        add(
            "values of one key",
            plain,
            vec![vec![Send(0, 1); 4], vec![Receive(0, 1), Receive(0, 1)], vec![Receive(0, 1), Receive(0, 1)]],
        );
        add(
            "an older step is wanted when the credit is used up",
            plain,
            vec![
                vec![Send(0, 1), Send(0, 2), Send(0, 3), Send(0, 1)],
                vec![Receive(0, 3), Receive(0, 1)],
                vec![Receive(0, 2), Receive(0, 1)],
            ],
        );
        add(
            "more waiters than cells",
            plain,
            vec![
                vec![Send(0, 1), Send(0, 2), Send(0, 3), Send(0, 4)],
                vec![Receive(0, 4), Receive(0, 3), Receive(0, 2)],
            ],
        );
        add(
            "edges without cells need each value",
            WindowOptions { max_cells: window, ..plain },
            vec![
                vec![Send(0, 1), Send(1, 1), Send(1, 2), Send(0, 2)],
                vec![Receive(0, 1), Receive(1, 2), Receive(0, 2)],
                vec![Receive(1, 1)],
            ],
        );
        add(
            "values land after they were taken",
            plain,
            vec![
                vec![Send(0, 1), Send(0, 1), Send(0, 2), End(1)],
                vec![ReceiveRemote(0, 1), ReceiveRemote(0, 2)],
                vec![ReceiveRemote(0, 1), EndHere(1)],
            ],
        );
        add(
            "a receive gives up while its value is on its way",
            plain,
            vec![
                vec![Send(0, 1), Send(0, 1), Send(0, 2)],
                vec![ReceiveRemote(0, 1), GiveUp(0), ReceiveRemote(0, 2)],
                vec![ReceiveRemote(0, 1), ReceiveRemote(0, 1)],
            ],
        );
        add(
            "a receive gives up",
            plain,
            vec![
                vec![Send(0, 1), Send(0, 2), Send(0, 3), Send(0, 3)],
                vec![Receive(0, 3), GiveUp(0), Receive(0, 3)],
                vec![Receive(0, 2)],
            ],
        );
        add(
            "a need crosses a value",
            plain,
            vec![
                vec![Send(0, 1), Send(0, 2), Send(0, 3), Send(0, 3), Send(0, 3)],
                vec![Receive(0, 3), Receive(0, 1), Receive(0, 3)],
                vec![Receive(0, 2), GiveUp(0)],
            ],
        );
        add(
            "a need crosses the end of its step at the sender",
            plain,
            vec![
                vec![Send(0, 1), Send(0, 2), Send(0, 3), End(3)],
                vec![Receive(0, 3), Receive(0, 3)],
                vec![Receive(0, 1)],
            ],
        );
        add(
            "a need crosses an abort",
            plain,
            vec![
                vec![Send(0, 1), Send(0, 2), Abort(3), Send(0, 3)],
                vec![Receive(0, 3), Receive(0, 1), Receive(0, 3)],
            ],
        );
        add(
            "a need crosses the end of its step at the receiver",
            plain,
            vec![
                vec![Send(0, 1), Send(0, 2), Send(0, 3), Send(0, 3)],
                vec![Receive(0, 3), EndHere(3), Receive(0, 2)],
                vec![Receive(0, 1)],
            ],
        );
        add(
            "a step ends at the sender before its values were taken",
            plain,
            vec![
                vec![Send(0, 1), Send(0, 1), End(1), Send(0, 2)],
                vec![Receive(0, 1), Receive(0, 2)],
                vec![Receive(0, 1)],
            ],
        );
        add(
            "a retirement crosses values",
            plain,
            vec![
                vec![Send(0, 1), Send(0, 2), Send(0, 3)],
                vec![Receive(0, 1), Retire(0), Receive(0, 3), Retire(0)],
                vec![Receive(0, 2)],
            ],
        );
        add(
            "a value fits no waiter",
            plain,
            vec![
                vec![Send(0, 1), Send(0, 1), Send(0, 2)],
                vec![ReceiveMismatch(0, 1), Receive(0, 1)],
                vec![Receive(0, 1), ReceiveMismatch(0, 2)],
            ],
        );
        add(
            "a value fits no receive, beside one that is on its way",
            plain,
            vec![
                vec![Send(0, 1), Send(0, 1), Send(0, 1)],
                vec![
                    ReceiveRemote(0, 1),
                    ReceiveRemote(0, 1),
                    GiveUp(0),
                    ReceiveMismatch(0, 1),
                    GiveUp(1),
                    Receive(0, 1),
                ],
            ],
        );
        add(
            "receives that do not wait",
            plain,
            vec![
                vec![Send(0, 1), Send(0, 2), Send(0, 3), Send(0, 3)],
                vec![TryReceive(0, 3), TryReceive(0, 3), Receive(0, 3)],
                vec![TryReceive(0, 1), Receive(0, 2)],
            ],
        );
        add(
            "an edge is announced before a receive",
            WindowOptions { usual_window: 2, largest_window: 2, ..plain },
            vec![
                vec![Send(0, 1), Send(0, 2), Send(0, 3)],
                vec![Widen(0), Receive(0, 3), Widen(0), Receive(0, 1)],
            ],
        );
        add(
            "edges share one number",
            WindowOptions { max_edges: 1, kept_edges: 0, ..plain },
            vec![
                vec![Send(0, 1), Send(1, 1), Send(0, 1)],
                vec![Receive(0, 1), Receive(1, 1)],
                vec![Receive(0, 1), Retire(0)],
            ],
        );
        add(
            "a sender flushes",
            plain,
            vec![
                vec![Send(0, 1), Send(0, 2), Flush, Send(0, 3), Flush],
                vec![Receive(0, 2), Receive(0, 1)],
                vec![TryReceive(0, 3), Receive(0, 3)],
            ],
        );
        add(
            "a sender flushes while a retirement crosses values",
            plain,
            vec![
                vec![Send(0, 1), Send(0, 2), Flush, Send(0, 1), Flush],
                vec![Receive(0, 1), Retire(0), Receive(0, 1), Retire(0)],
            ],
        );
        add(
            "a sender flushes values outside the window, and one that fits no waiter",
            plain,
            vec![
                vec![Send(0, 1), Send(0, 2), Send(0, 3), Flush],
                vec![Receive(0, 3), GiveUp(0), ReceiveMismatch(0, 3), Receive(0, 3)],
                vec![Receive(0, 1)],
            ],
        );
        add(
            "a sender flushes steps that end",
            plain,
            vec![vec![Send(0, 1), Send(0, 2), Flush, End(1), Flush], vec![Receive(0, 3), EndHere(2)]],
        );
        add(
            "an edge is refused",
            plain,
            vec![vec![Send(0, 1)], vec![Receive(UNSERVED, 1), Receive(0, 1), Receive(UNSERVED, 2)]],
        );
        add(
            "a sender returns while values are held",
            plain,
            vec![
                vec![Send(0, 1), Send(0, 2), Send(0, 3), SenderReturns, Send(0, 2), Send(0, 4)],
                vec![Receive(0, 1), Receive(0, 4)],
                vec![Receive(0, 2), Receive(0, 2)],
            ],
        );
        add(
            "a receiver returns",
            plain,
            vec![
                vec![Send(0, 1), Send(0, 1), Send(0, 1), Send(0, 2)],
                vec![Receive(0, 1), ReceiverReturns, Receive(0, 2), Receive(0, 1)],
            ],
        );
        let resends = WindowOptions { resends: true, ..plain };
        let repair = || vec![vec![Break, SenderRepaired], vec![ReceiverRepaired]];
        add(
            "a repair with values under way",
            resends,
            [vec![vec![Send(0, 1), Send(0, 1), Send(0, 1)], vec![Receive(0, 1); 3]], repair()].concat(),
        );
        add(
            "a repair with a flush under way",
            resends,
            [
                vec![
                    vec![Send(0, 1), Send(0, 1), Flush, Send(0, 2), Flush],
                    vec![Receive(0, 1), Receive(0, 2)],
                ],
                repair(),
            ]
            .concat(),
        );
        add(
            "a receiver returns after a repair",
            resends,
            [
                vec![
                    vec![Send(0, 1), Send(0, 1), Send(0, 1), Send(0, 2)],
                    vec![Receive(0, 1), ReceiverReturns, Receive(0, 2), Receive(0, 1)],
                ],
                repair(),
            ]
            .concat(),
        );
        add(
            "a repair with needs under way",
            resends,
            [vec![vec![Send(0, 1), Send(0, 2), Send(0, 3)], vec![Receive(0, 3), Receive(0, 2)]], repair()]
                .concat(),
        );
        add(
            "a repair with the end of a step under way",
            resends,
            [vec![vec![Send(0, 1), Send(0, 1), End(1)], vec![Receive(0, 1), Receive(0, 1)]], repair()]
                .concat(),
        );
        add(
            "a repair with a retirement under way",
            resends,
            [
                vec![vec![Send(0, 1), Send(0, 2)], vec![Receive(0, 1), Retire(0), Receive(0, 2), Retire(0)]],
                repair(),
            ]
            .concat(),
        );
        add(
            "a repair with a step that ends at the receiver",
            resends,
            [
                vec![
                    vec![Send(0, 1), Send(0, 2), Send(0, 3)],
                    vec![Receive(0, 3), EndHere(3), Receive(0, 2)],
                ],
                repair(),
            ]
            .concat(),
        );
    }
    add(
        "a window grows",
        WindowOptions { usual_window: 3, largest_window: 3, ..options(1) },
        vec![vec![Send(0, 1); 5], vec![Receive(0, 1); 3], vec![Receive(0, 1); 2]],
    );
    cases
}
