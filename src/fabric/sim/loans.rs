//! Loans of tensors in place.

use super::load::SimPayload;
use super::network::{SimEvent, SimState};
use super::side::{HeldMemory, SimArrival};
use crate::fabric::{LinkFailure, LoanPermit, MAX_LOANS, PostError};
use crate::memory::{GiveBack, Lender, Tensor};
use crate::mutants::{Mutant, is_on};
use crate::wire::ShortMessage;
use std::sync::{Mutex, PoisonError};

/// Loans that borrowers have dropped. A drop may happen anywhere, also under the network's lock.
#[derive(Default)]
pub(super) struct ReturnedLoans(Mutex<Vec<u32>>);

impl ReturnedLoans {
    pub fn take(&self) -> Vec<u32> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl GiveBack for ReturnedLoans {
    fn give_back(&self, loan: u32) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(loan);
    }
}

/// A loan that is out.
pub(super) struct SimLoan {
    tensor: Tensor,
    /// Counts the bytes as lent while the loan is out.
    _permit: Option<LoanPermit>,
    /// The lender's side and operation, until the operation has ended.
    operation: Option<(usize, u64)>,
    /// The borrower's side, if it holds the loan.
    borrower: Option<usize>,
}

impl SimState {
    /// A loan permit of the process of this side.
    pub fn permit_loan(&mut self, side: usize, bytes: u64) -> Option<LoanPermit> {
        if !self.options.lends {
            return None;
        }
        self.processes[self.sides[side].process.0 as usize].limiter.permit(bytes)
    }

    pub fn lend(
        &mut self,
        side: usize,
        source: &mut Option<Tensor>,
        permit: &mut Option<LoanPermit>,
        message: &ShortMessage,
    ) -> Result<(), PostError> {
        if !self.options.lends {
            return Err(PostError::Refused("this network does not lend"));
        }
        self.has_room(side)?;
        if self.sides[side].loans() >= MAX_LOANS {
            return Err(PostError::Full);
        }
        let tensor = source.take().ok_or(PostError::Refused(crate::fabric::NO_SOURCE))?;
        let loan = self.next_loan;
        self.next_loan += 1;
        let operation = self.sides[side].post(HeldMemory::Loan(loan));
        self.digest.bytes(tensor.bytes());
        let (_permit, operation_of) = (permit.take(), Some((side, operation)));
        self.loans.insert(loan, SimLoan { tensor, _permit, operation: operation_of, borrower: None });
        self.depart(side, operation, SimPayload::Loan { loan, message: *message });
        Ok(())
    }

    /// A loan arrives at its borrower.
    pub(super) fn borrow(&mut self, to: usize, loan: u32, message: ShortMessage) -> Result<(), LinkFailure> {
        // The lender has ended meanwhile: nothing is lent.
        let Some(entry) = self.loans.get_mut(&loan) else { return Ok(()) };
        let Some((from, _)) = entry.operation else { return Ok(()) };
        let (offset, len) = entry.tensor.span().map_or((0, 0), |span| (span.offset, span.len));
        let region = self.processes[self.sides[from].process.0 as usize].region.clone();
        let tensor = entry.tensor.clone();
        entry.borrower = Some(to);
        let (region, offset) = self.flip_loan(to, tensor.bytes()).unwrap_or((region, offset));
        let lender = Lender::new(region, self.returned.clone());
        let Some(part) = lender.part(offset, len) else {
            self.returned.give_back(loan);
            return Err(LinkFailure::Protocol("it lent what is not in its pool".into()));
        };
        let bytes = part.take(loan);
        self.sides[to].bring(SimArrival::Lent(message, bytes));
        Ok(())
    }

    /// A borrower has dropped a loan.
    pub(super) fn give_back(&mut self, loan: u32) {
        let Some(entry) = self.loans.get_mut(&loan) else { return };
        let Some(borrower) = entry.borrower.take() else { return };
        if entry.operation.is_none() {
            self.loans.remove(&loan); // no operation waits for it
        } else if !self.is_dead(borrower) && !self.sides[borrower].is_cut {
            self.note("give back", borrower, loan.into());
            let word = self.after_a_delay();
            self.schedule(word, SimEvent::GiveBack { loan });
        }
    }

    /// The give-back has reached the lender.
    pub(super) fn loan_ended(&mut self, loan: u32) {
        if let Some(SimLoan { operation: Some((side, operation)), .. }) = self.loans.remove(&loan) {
            self.done(side, operation, None);
        }
    }

    /// The operation has ended without a give-back. A loan that is out stays until the borrower
    /// drops it.
    pub(super) fn release_loan(&mut self, loan: u32) {
        match self.loans.get_mut(&loan) {
            Some(entry) if entry.borrower.is_some() && !is_on(Mutant::LoanEndsWithLink) => {
                entry.operation = None
            }
            _ => drop(self.loans.remove(&loan)),
        }
    }
}
