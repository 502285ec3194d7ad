//! What rank 0 tells the other ranks before each pass.
//!
//! Invariant: a message and the messages before it determine a pass completely; ranks never decide
//! anything themselves. Numbers are little-endian u32, lists are preceded by their length.

use paceline_model::pass::AttentionForm;

use crate::error::{Result, RuntimeError};

/// A message of rank 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Run a pass.
    Step(StepPlan),
    /// Forget a sequence; its pages may be given to others.
    Forget {
        /// The sequence.
        sequence: u32,
    },
    /// End.
    Stop,
}

/// One pass over the model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// Rows of the cache to copy first, from slot to slot, in this order: what the last round
    /// accepted.
    pub moves: Vec<(u32, u32)>,
    /// The sequences in the pass, in the order of their rows.
    pub sequences: Vec<SequenceStep>,
    /// One token a row.
    pub tokens: Vec<u32>,
    /// Whether attention is expanded (prompts) or absorbed (decoding, verification).
    pub expanded: bool,
    /// Rows whose logits are wanted.
    pub logit_rows: Vec<u32>,
}

/// The part of one sequence in a pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SequenceStep {
    /// Name of the sequence.
    pub sequence: u32,
    /// Pages that it gets before the pass.
    pub new_pages: Vec<u32>,
    /// Committed rows.
    pub context: u32,
    /// Rows in this pass.
    pub rows: u32,
    /// For a draft tree, the parent of each row (the root's is itself); empty for a chain.
    pub parents: Vec<u32>,
}

impl StepPlan {
    /// Makes this a step without sequences.
    pub fn clear(&mut self, form: AttentionForm) {
        self.moves.clear();
        self.sequences.clear();
        self.tokens.clear();
        self.logit_rows.clear();
        self.expanded = form == AttentionForm::Expanded;
    }

    /// Adds a sequence with a row for each of `tokens`, in a chain after `context` rows.
    pub fn add(&mut self, sequence: u32, new_pages: &[u32], context: usize, tokens: &[u32]) {
        self.sequences.push(SequenceStep {
            sequence,
            new_pages: new_pages.to_vec(),
            context: context as u32,
            rows: tokens.len() as u32,
            parents: Vec::new(),
        });
        self.tokens.extend_from_slice(tokens);
    }

    /// Makes the rows of the sequence that was added last those of a tree.
    pub fn branch(&mut self, parents: impl Iterator<Item = u32>) {
        if let Some(sequence) = self.sequences.last_mut() {
            sequence.parents.extend(parents);
        }
    }

    /// How attention is computed.
    pub fn form(&self) -> AttentionForm {
        if self.expanded { AttentionForm::Expanded } else { AttentionForm::Absorbed }
    }
}

const STEP: u32 = 1;
const FORGET: u32 = 2;
const STOP: u32 = 3;

impl Command {
    /// Writes the message to `bytes`, replacing what is there.
    pub fn encode(&self, bytes: &mut Vec<u8>) {
        bytes.clear();
        match self {
            Self::Step(plan) => encode_step(plan, bytes),
            Self::Forget { sequence } => {
                put(bytes, FORGET);
                put(bytes, *sequence);
            }
            Self::Stop => put(bytes, STOP),
        }
    }

    /// Reads a message.
    ///
    /// # Errors
    /// [`RuntimeError::Protocol`] if it is damaged.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader { bytes };
        let command = match reader.number()? {
            STEP => Self::Step(reader.step()?),
            FORGET => Self::Forget { sequence: reader.number()? },
            STOP => Self::Stop,
            _ => return Err(RuntimeError::Protocol { what: "unknown command" }),
        };
        match reader.bytes {
            [] => Ok(command),
            _ => Err(RuntimeError::Protocol { what: "it is too long" }),
        }
    }
}

/// Writes a step without wrapping it in a [`Command`] first.
pub(crate) fn encode_step(plan: &StepPlan, bytes: &mut Vec<u8>) {
    bytes.clear();
    put(bytes, STEP);
    put(bytes, plan.moves.len() as u32);
    for &(from, to) in &plan.moves {
        put(bytes, from);
        put(bytes, to);
    }
    put(bytes, plan.sequences.len() as u32);
    for sequence in &plan.sequences {
        put(bytes, sequence.sequence);
        put_list(bytes, &sequence.new_pages);
        put(bytes, sequence.context);
        put(bytes, sequence.rows);
        put_list(bytes, &sequence.parents);
    }
    put_list(bytes, &plan.tokens);
    put(bytes, u32::from(plan.expanded));
    put_list(bytes, &plan.logit_rows);
}

fn put(bytes: &mut Vec<u8>, number: u32) {
    bytes.extend_from_slice(&number.to_le_bytes());
}

fn put_list(bytes: &mut Vec<u8>, numbers: &[u32]) {
    put(bytes, numbers.len() as u32);
    for &number in numbers {
        put(bytes, number);
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
}

impl Reader<'_> {
    fn number(&mut self) -> Result<u32> {
        let cut = RuntimeError::Protocol { what: "it is cut short" };
        let (number, rest) = self.bytes.split_first_chunk::<4>().ok_or(cut)?;
        self.bytes = rest;
        Ok(u32::from_le_bytes(*number))
    }

    /// A length, which the rest of the message must be able to hold.
    fn length(&mut self, item_bytes: usize) -> Result<usize> {
        let length = self.number()? as usize;
        if length > self.bytes.len() / item_bytes {
            return Err(RuntimeError::Protocol { what: "a list is longer than the message" });
        }
        Ok(length)
    }

    fn list(&mut self) -> Result<Vec<u32>> {
        let length = self.length(4)?;
        (0..length).map(|_| self.number()).collect()
    }

    fn step(&mut self) -> Result<StepPlan> {
        let moves = self.length(8)?;
        let moves =
            (0..moves).map(|_| Ok((self.number()?, self.number()?))).collect::<Result<_>>()?;
        let sequences = self.length(4)?;
        let sequences = (0..sequences)
            .map(|_| {
                Ok(SequenceStep {
                    sequence: self.number()?,
                    new_pages: self.list()?,
                    context: self.number()?,
                    rows: self.number()?,
                    parents: self.list()?,
                })
            })
            .collect::<Result<_>>()?;
        Ok(StepPlan {
            moves,
            sequences,
            tokens: self.list()?,
            expanded: self.number()? != 0,
            logit_rows: self.list()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step() -> Command {
        Command::Step(StepPlan {
            moves: vec![(3, 1), (9, 2)],
            sequences: vec![SequenceStep {
                sequence: 7,
                new_pages: vec![4],
                context: 30,
                rows: 3,
                parents: vec![0, 0, 1],
            }],
            tokens: vec![5, 6, 7],
            expanded: false,
            logit_rows: vec![0, 2],
        })
    }

    #[test]
    fn messages_survive_the_journey() {
        let mut bytes = Vec::new();
        for command in [step(), Command::Forget { sequence: 9 }, Command::Stop] {
            command.encode(&mut bytes);
            assert_eq!(Command::decode(&bytes).unwrap(), command);
        }
    }

    #[test]
    fn damaged_messages_are_refused() {
        let mut bytes = Vec::new();
        step().encode(&mut bytes);
        for length in 0..bytes.len() {
            assert!(Command::decode(&bytes[..length]).is_err(), "cut to {length} bytes");
        }
        let mut longer = bytes.clone();
        longer.push(0);
        assert!(Command::decode(&longer).is_err());
        let mut huge = bytes;
        huge[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(Command::decode(&huge).is_err());
    }
}
