//! Drafting on rank 0: keeps the draft network's cache in step with the target, and grows chains
//! and trees with it, those of several sequences in the same passes.
//!
//! Row i of the draft pairs the target's captured state of position i with the token of i + 1. The
//! draft's cache has the same slots as the target's. Invariant: rows 0..`rows` of a sequence were
//! made from true states of committed tokens; what drafting writes beyond them is scratch.
//! Committed states wait until the next time something is drafted, so that a round without drafting
//! costs the draft nothing. A sequence that ends leaves draft rows for prompts that begin alike:
//! that is one pass at most, and rows beyond it are left out. Start reading at
//! [`Drafter::propose`].

use std::time::{Duration, Instant};

use paceline_kernels::{
    DType, Stream, Tensor,
    ops::cache::{copy_rows, gather_rows, move_slots},
};
use paceline_model::{
    eagle3::draft::{Draft, DraftPass, DraftStates},
    pass::Segment,
};
use paceline_spec::{Candidate, top_k_log_softmax};

use crate::error::Result;

mod growth;

pub(crate) use growth::{Drafting, Growth};

/// Waiting states of all sequences take at most this much memory, unless [`WAITING_ROWS_MIN`] of
/// each take more.
const WAITING_BYTES_MAX: usize = 64 << 20;
/// Waiting rows of one sequence for which there is always room, if it can become so long.
const WAITING_ROWS_MIN: usize = 64;
/// More waiting rows than the deepest round commits are left over from rounds without drafting.
const CATCH_UP_ROWS: usize = 16;

/// The draft network, its cache and working memory: what all sequences share.
pub(crate) struct Drafter {
    draft: Draft,
    stream: Stream,
    cache: Tensor,
    rows_max: usize,
    /// Waiting states: `share_rows` rows for each sequence, touched when they are first used.
    states: Tensor,
    share_rows: usize,
    shares_free: Vec<u32>,
    /// Working memory of passes.
    batch: Tensor,
    numbers: Numbers,
    candidates: Vec<Candidate>,
    level: Vec<Candidate>,
}

/// Lists of one pass.
#[derive(Default)]
struct Numbers {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    /// Rows that the states come from.
    sources: Vec<u32>,
    logit_rows: Vec<u32>,
}

/// Sizes of a drafter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DrafterSizes {
    /// Rows of the cache.
    pub(crate) slots: usize,
    /// Most rows of a pass of the draft.
    pub(crate) rows_max: usize,
    /// Longest sequence.
    pub(crate) positions_max: usize,
    /// Most sequences that draft at the same time.
    pub(crate) sequences_max: usize,
}

impl Drafter {
    /// A drafter with an empty cache.
    pub(crate) fn new(draft: Draft, stream: Stream, dtype: DType, sizes: DrafterSizes) -> Self {
        let DrafterSizes { slots, rows_max, sequences_max, .. } = sizes;
        let width = states_width(&draft);
        let share_rows = sizes.share_rows(width * dtype.bytes());
        Self {
            cache: draft.cache(slots),
            states: Tensor::zeros(dtype, &[share_rows * sequences_max, width]),
            share_rows,
            shares_free: (0..sequences_max as u32).rev().collect(),
            batch: Tensor::zeros(dtype, &[rows_max, width]),
            draft,
            stream,
            rows_max,
            numbers: Numbers::default(),
            candidates: Vec::new(),
            level: Vec::new(),
        }
    }

    /// Bytes that a drafter with `draft` takes for its cache and for waiting states.
    pub(crate) fn bytes(draft: &Draft, dtype: DType, sizes: DrafterSizes) -> u64 {
        let row_bytes = states_width(draft) * dtype.bytes();
        let waiting = (sizes.share_rows(row_bytes) * sizes.sequences_max) as u64 * row_bytes as u64;
        (sizes.slots * dtype.bytes()) as u64 * draft.cache_width() as u64 + waiting
    }

    /// Longest sequence that the draft was made for.
    pub(crate) fn positions_max(&self) -> usize {
        self.draft.config().positions_max
    }

    /// Number of tokens that the draft can propose.
    pub(crate) fn proposable_tokens(&self) -> usize {
        self.draft.config().draft_vocabulary
    }

    /// Bytes of the cache.
    pub(crate) fn cache_bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// A sequence whose first `rows` rows are in the draft's cache.
    ///
    /// # Panics
    /// If more sequences draft than this drafter was made for.
    pub(crate) fn start(&mut self, rows: usize) -> Drafting {
        let share = self.shares_free.pop().expect("no more sequences draft than were announced");
        Drafting::new(share, rows)
    }

    /// Takes back what a sequence used.
    pub(crate) fn release(&mut self, drafting: Drafting) {
        self.shares_free.push(drafting.share);
    }

    /// Copies rows of the cache from slot to slot.
    pub(crate) fn move_rows(&mut self, moves: &[(u32, u32)]) {
        move_slots(&mut self.cache, moves);
    }

    /// Takes the captured states of committed rows (`rows` of `taps`) and the token after each.
    /// `slots` are those of the sequence, used if the waiting states must be worked off.
    pub(crate) fn commit(
        &mut self,
        drafting: &mut Drafting,
        taps: &Tensor,
        rows: &[u32],
        tokens: &[u32],
        slots: &[u32],
    ) {
        assert_eq!(rows.len(), tokens.len());
        // Beyond its positions the draft is of no use any more, so nothing is kept for it.
        drafting.is_beyond |= drafting.end() + rows.len() > self.positions_max();
        if drafting.is_beyond {
            return;
        }
        let mut done = 0;
        while done < rows.len() {
            if drafting.waiting.len() == self.share_rows {
                self.work_off(drafting, slots, 0);
            }
            let waiting = drafting.waiting.len();
            let end = rows.len().min(done + self.share_rows - waiting);
            let first = (drafting.share as usize * self.share_rows + waiting) as u32;
            let places = first..first + (end - done) as u32;
            copy_rows(taps, &rows[done..end], &mut self.states, places);
            drafting.waiting.extend_from_slice(&tokens[done..end]);
            done = end;
        }
    }

    /// Runs the draft over the oldest waiting rows of a sequence that has ended, at most one pass
    /// of them: nobody waits for these rows yet, but everybody for the next round.
    pub(crate) fn complete(&mut self, drafting: &mut Drafting, slots: &[u32]) {
        let kept = drafting.waiting.len().saturating_sub(self.rows_max);
        self.work_off(drafting, slots, kept);
    }

    /// Runs the draft over all waiting rows but the last `kept`.
    pub(crate) fn work_off(&mut self, drafting: &mut Drafting, slots: &[u32], kept: usize) {
        let end = drafting.waiting.len().saturating_sub(kept);
        let first = drafting.share as usize * self.share_rows;
        let mut done = 0;
        while done < end {
            let count = (end - done).min(self.rows_max);
            self.numbers.clear();
            self.numbers.tokens.extend_from_slice(&drafting.waiting[done..done + count]);
            self.numbers.positions.extend((drafting.rows as u32..).take(count));
            self.numbers.sources.extend((first + done) as u32..(first + done + count) as u32);
            let (rows, context, paths) = (count, drafting.rows, None);
            let segment = Segment { first_row: 0, rows, context, earlier: 0, slots, paths };
            self.extend(&[segment]);
            drafting.rows += count;
            done += count;
        }
        // The last rows stay, at the front.
        let moves = (0..drafting.waiting.len() - end).map(|row| (first + end + row, first + row));
        for (from, to) in moves {
            move_slots(&mut self.states, &[(from as u32, to as u32)]);
        }
        drafting.waiting.drain(..end);
    }

    /// Grows what each of `growths` asks for below its last committed token, into its tree. Returns
    /// the time that was spent on rows left over from rounds without drafting.
    ///
    /// # Errors
    /// If the draft's logits are not finite.
    pub(crate) fn propose(&mut self, growths: &mut [Growth<'_>]) -> Result<Duration> {
        let started = Instant::now();
        let mut caught_up = Duration::ZERO;
        for growth in growths.iter_mut() {
            if growth.drafting.waiting.len() > CATCH_UP_ROWS.min(self.rows_max) {
                self.work_off(growth.drafting, growth.slots, 1);
                caught_up = started.elapsed();
            }
        }
        let mut rest = growths;
        while !rest.is_empty() {
            let mut rows = 0;
            let fits = |growth: &&Growth<'_>| {
                rows += growth.rows_max();
                rows <= self.rows_max
            };
            // One alone always fits: the engine refuses wider trees.
            let count = rest.iter().take_while(fits).count().max(1);
            let (group, others) = rest.split_at_mut(count);
            self.grow(group)?;
            rest = others;
        }
        Ok(caught_up)
    }

    /// Grows a group whose passes have room for all of it.
    fn grow(&mut self, growths: &mut [Growth<'_>]) -> Result<()> {
        self.numbers.clear();
        for growth in growths.iter_mut() {
            let Drafting { waiting, rows, share, .. } = &*growth.drafting;
            let first = share * self.share_rows as u32;
            self.numbers.positions.extend((*rows as u32..).take(waiting.len()));
            self.numbers.sources.extend(first..first + waiting.len() as u32);
            growth.first_row = self.numbers.tokens.len();
            self.numbers.tokens.extend_from_slice(waiting);
            self.numbers.logit_rows.push(self.numbers.tokens.len() as u32 - 1);
        }
        let segments: Vec<Segment<'_>> = growths.iter().map(Growth::waiting_segment).collect();
        self.extend(&segments);
        for (row, growth) in growths.iter_mut().enumerate() {
            growth.drafting.rows += growth.drafting.waiting.len();
            growth.drafting.waiting.clear();
            self.level.clear();
            self.add_best(row, growth.parameters.topk())?;
            growth.start(&self.level, self.numbers.logit_rows[row])?;
        }
        while growths.iter().any(Growth::is_growing) {
            self.feed_frontiers(growths);
            let mut row = 0;
            for growth in growths.iter_mut().filter(|growth| growth.is_growing()) {
                self.level.clear();
                for _ in 0..growth.frontier().len() {
                    self.add_best(row, growth.parameters.topk())?;
                    row += 1;
                }
                growth.expand(&self.level)?;
            }
        }
        growths.iter_mut().for_each(Growth::finish);
        Ok(())
    }

    /// Runs the draft over waiting rows, those of `numbers`.
    fn extend(&mut self, segments: &[Segment<'_>]) {
        let Numbers { tokens, positions, sources, logit_rows } = &self.numbers;
        self.batch.set_rows(tokens.len());
        gather_rows(&self.states, sources, 0, &mut self.batch);
        let states = DraftStates::Captured(&self.batch);
        let pass = DraftPass { tokens, states, positions, segments, logit_rows };
        self.draft.forward(&self.stream, &pass, &mut self.cache);
    }

    /// Runs the draft over the nodes that trees grow from next.
    fn feed_frontiers(&mut self, growths: &mut [Growth<'_>]) {
        self.numbers.clear();
        for growth in growths.iter_mut().filter(|growth| growth.is_growing()) {
            let Numbers { tokens, positions, sources, .. } = &mut self.numbers;
            growth.feed(tokens, positions, sources);
        }
        let Numbers { tokens, positions, sources, logit_rows } = &mut self.numbers;
        logit_rows.extend(0..tokens.len() as u32);
        let growing = growths.iter().filter(|growth| growth.is_growing());
        let segments: Vec<Segment<'_>> = growing.map(Growth::frontier_segment).collect();
        let states = DraftStates::Recurrent(sources);
        let pass = DraftPass { tokens, states, positions, segments: &segments, logit_rows };
        self.draft.forward(&self.stream, &pass, &mut self.cache);
    }

    /// Appends the best tokens of a row of logits to `level`, as ids of the target.
    fn add_best(&mut self, row: usize, count: usize) -> Result<()> {
        let width = self.draft.logits().width();
        let logits = &self.draft.logits().as_slice::<f32>()[row * width..(row + 1) * width];
        top_k_log_softmax(logits, count, &mut self.candidates)?;
        let to_target = |candidate: &Candidate| Candidate {
            token: self.draft.target_token(candidate.token),
            ..*candidate
        };
        self.level.extend(self.candidates.iter().map(to_target));
        Ok(())
    }
}

impl DrafterSizes {
    /// Waiting rows of one sequence, of `row_bytes` each.
    fn share_rows(&self, row_bytes: usize) -> usize {
        let affordable = WAITING_BYTES_MAX / row_bytes / self.sequences_max;
        self.positions_max.min(affordable.max(WAITING_ROWS_MIN))
    }
}

/// Values of a captured state.
fn states_width(draft: &Draft) -> usize {
    draft.config().captured_states * draft.config().target_hidden
}

impl Numbers {
    fn clear(&mut self) {
        for list in [&mut self.tokens, &mut self.positions, &mut self.sources, &mut self.logit_rows]
        {
            list.clear();
        }
    }
}
