//! Bugs that can be switched on, to prove that the tests find them. These tests are the simulation
//! of whole engines, the exploration of edge windows, and the tests of modules.
//!
//! They exist only in a build with `--cfg tensorwire_mutants`, which `tests/nightly` makes. In any
//! other build [`is_on`] is a constant, and the compiler removes each mutant.

macro_rules! mutants {
    (
        simulation { $($(#[$doc:meta])+ $mutant:ident,)+ }
        windows { $($(#[$window_doc:meta])+ $window:ident,)+ }
        parts { $($(#[$part_doc:meta])+ $part:ident,)+ }
    ) => {
        /// A bug.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        // One of them is in the simulated fabric.
        #[cfg_attr(not(feature = "sim"), allow(dead_code))]
        pub enum Mutant {
            $($(#[$doc])+ $mutant,)+
            $($(#[$window_doc])+ $window,)+
            $($(#[$part_doc])+ $part,)+
        }

        impl Mutant {
            /// The bugs that the simulation of whole engines finds.
            #[cfg(tensorwire_mutants)]
            pub const OF_ENGINES: &[Mutant] = &[$(Mutant::$mutant),+];

            /// The bugs that the exploration of edge windows finds.
            #[cfg(all(test, tensorwire_mutants))]
            pub const OF_WINDOWS: &[Mutant] = &[$(Mutant::$window),+];
        }
    };
}

mutants! {
    simulation {
        /// A message that had to wait uses up two credits.
        LostCredit,
        /// One receive more than was posted is promised to the peer.
        CreditTooMany,
        /// A message does not queue behind writes that wait: a message comes ahead of the write.
        MessageOvertakesQueue,
        /// A step that was cleaned up can begin again.
        CleanedStepReturns,
        /// The last value of a key is the first to leave.
        LastValueFirst,
        /// The first two fragments of a message change places.
        FragmentsSwapped,
        /// A local value of another shape than the tensor given for it is lost.
        LocalShapeMismatchLost,
        /// The receiver ignores a checksum that differs from the one of the received bytes.
        ChecksumNotCompared,
        /// The checksum covers the first 8 bytes only.
        ChecksumOfHead,
        /// The sender omits the checksum from its records.
        ChecksumLeftOut,
        /// More is lent than the bound says.
        LentPastBound,
        /// A loan that comes back makes room for two.
        LoanCountedBackTwice,
        /// A loan that comes back makes no room.
        LoanNeverCountedBack,
        /// What was lent is used again when its link ends, though the borrower reads it.
        LoanEndsWithLink,
        /// The last message of a pack is thrown away.
        LastOfPackLost,
        /// A write does not wait for the messages of the pack that was begun before it.
        WriteOvertakesPack,
        /// The port is not told that a batch is over.
        BatchNeverEnds,
        /// A tensor with new meta-data travels under the number of the one before.
        MetaNumberKept,
        /// A record lets its receiver keep a loan for which the sender has no permit.
        BorrowedWithoutPermit,
        /// A value that fits no waiting receive is thrown away.
        MismatchDropped,
        /// A value that does not fit a direct receive is thrown away.
        DirectMismatchDropped,
        /// A value that waits for credit is not counted as outstanding.
        WaitingValueUncounted,
        /// The values that the end of a step drops are still counted as outstanding.
        EndedValuesOutstanding,
        /// A receive that gives up stays in line at its edge.
        GivenUpStaysListed,
        /// The deadlines of the receives that still wait are forgotten when one has passed.
        LaterDeadlinesForgotten,
        /// A peer that announces its first edge does not hear of the steps that were aborted.
        EarlierAbortsNotTold,
        /// What an old life of a peer has sent stays in the windows.
        OldWindowsKept,
        /// One of the receives that wait for a lost peer is not told.
        LossNotToldToWindow,
    }
    windows {
        /// A value whose receive gives up while it is on its way passes over the next waiter.
        LeftValueNotPassedOn,
        /// A value that fits no receive goes behind those that are on their way.
        PutBackLast,
        /// The end of a step at the sender drops values that receives have taken.
        TakenEndsWithSender,
        /// A value that answers a need uses up credit.
        NeedAnswerUsesCredit,
        /// A receiver needs more values than its sender remembers.
        NeedsBeyondLimit,
        /// A receive that waited until fewer values are needed is forgotten.
        UnaskedForgotten,
        /// A need for a value that is not there yet is forgotten.
        NeedForgotten,
        /// The sender does not hear that a step's needs are taken back.
        UnneedNotSent,
        /// More credit is announced than the window has cells.
        CreditPastWindow,
        /// Credit does not go back.
        CreditNotReturned,
        /// A value that is dropped because its step is over occupies its cell.
        DroppedValueOccupies,
        /// A receiver tells a sender that flushes what it holds, and not what it takes.
        FlushedOnce,
        /// An edge is retired although a value is under way.
        RetirementNotVoid,
        /// The newest of the waiting values leaves first.
        NewestFirst,
        /// An edge that holds values is retired.
        RetiredWhileHeld,
        /// An announcement after a loss ignores the cells that are occupied.
        OccupiedCellsIgnored,
        /// After a repair, values that came are sent again.
        ResentFromStart,
        /// After a repair, the lost values leave behind those that waited.
        ResentLast,
        /// After a repair, needs are not repeated.
        NeedNotRepeated,
        /// After a repair, values of a step that is over are sent again.
        EndedStepResent,
        /// The end of a step at the sender does not end its receives.
        StepsOverMissesWaiter,
        /// Values that were sent to a life that has ended are sent to the next.
        LostValuesWait,
        /// An edge that is forgotten keeps its cells.
        CellsNotFreed,
        /// A window grows into cells that other edges have.
        GrowthBeyondCells,
        /// An edge that waits for a number is forgotten when one is free.
        UnnumberedForgotten,
        /// The next message ends the newest of the receives that wait.
        ShortEndOutOfOrder,
        /// A receive that the next message ends keeps the credit that is due.
        ShortEndKeepsCredit,
    }
    // The tests of the modules find these, each by `assert_found`.
    parts {
        /// A write of another length than its destination counts as landed.
        PartLanded,
        /// A value that comes after its receive was dropped is lost.
        ValueToNobody,
        /// An offered tensor whose receive gives up is lost.
        LandingDropped,
        /// The sender keeps an offered tensor whose step has ended at the receiver.
        OfferNotDeclined,
        /// The sender keeps a destination that the tensor does not fit.
        DestinationNotReleased,
        /// Eager tensors are sent beyond their bound.
        EagerBeyondBound,
        /// A destination stays granted when no receive waits any more.
        DestinationNotWithdrawn,
        /// Values that never left are still counted when their link is gone.
        OutstandingLeak,
        /// The first message of a pack is lost.
        FirstOfPackSkipped,
        /// Credit of any edge joins that of the edges before.
        AnyEdgeJoins,
        /// A walk over the edges of a batch misses what comes for later edges.
        LaterEdgesIgnored,
        /// A thread that waits on the poller does not look for commands of other threads.
        CommandsIgnored,
        /// A call without a command runs again for each command that was left.
        DirectCallRepeated,
        /// Peers do not hear which steps were cleaned up.
        EndsNotTold,
        /// A loan is back as soon as its place has any number.
        AnyNumberReturns,
        /// A borrower takes a loan into a place that is in use.
        PlaceTakenTwice,
        /// A loan that was only read is not given back.
        ReadLoanKept,
        /// A loan that is kept is given back at once.
        KeptLoanGivenBack,
        /// A message is taken without a receive for it.
        TakenWithoutReceive,
        /// A receive takes the tensor of a loan that is for another one.
        LentRecordNotCompared,
        /// A receive loses its destination by a look at a message that is not its own.
        DestinationLost,
    }
}

/// Whether a bug is switched on.
#[cfg(not(tensorwire_mutants))]
#[inline(always)]
pub const fn is_on(_mutant: Mutant) -> bool {
    false
}

#[cfg(all(test, tensorwire_mutants))]
pub use switched::assert_found;
#[cfg(tensorwire_mutants)]
pub use switched::{is_on, switch};

#[cfg(tensorwire_mutants)]
mod switched {
    use super::Mutant;
    use std::sync::atomic::{AtomicU8, Ordering};

    const NONE: u8 = u8::MAX;
    static ON: AtomicU8 = AtomicU8::new(NONE);

    /// Whether a bug is switched on.
    pub fn is_on(mutant: Mutant) -> bool {
        ON.load(Ordering::Relaxed) == mutant as u8
    }

    /// Switches one bug on, and every other off.
    pub fn switch(mutant: Option<Mutant>) {
        ON.store(mutant.map_or(NONE, |mutant| mutant as u8), Ordering::Relaxed);
    }

    /// Asserts that a test finds a bug. No other test may run meanwhile.
    #[cfg(test)]
    pub fn assert_found(mutant: Mutant, by: fn()) {
        by();
        switch(Some(mutant));
        let found = std::panic::catch_unwind(by).is_err();
        switch(None);
        assert!(found, "{mutant:?} is not found");
    }
}
