//! The scheduler: verifies as many drafted tokens as make the most tokens a second.
//!
//! A round that verifies k tokens makes `1 + Σ survival` tokens and takes the time that such rounds were measured to take. Survival
//! is the product of confidences. A token is verified or not before anybody knows which it is: its own confidence depends on the
//! tokens before it only, and what is assumed of later places is what was seen of them in earlier rounds. A scheduler that looked at
//! the whole block and then chose the best beginning would verify tokens more often when they are good for it, and bend the
//! distribution of the text.

use super::{Counters, Draft, Round};

/// Rounds whose mean a figure is, about.
const MEMORY: f64 = 8.0;
/// Times that a figure is taken before it is trusted.
const TRUSTED: u32 = 2;
/// Rounds after which a figure is taken again: rounds take longer as a text grows.
const STALE: u64 = 256;
/// Drafted rounds before drafting is judged.
const TRIAL: u32 = 8;
/// Rounds of the first and of the longest pause of drafting.
const PAUSE: (u64, u64) = (16, 1024);

/// Chooses, round by round, whether to draft and how many tokens to verify.
#[derive(Debug, Clone)]
pub struct Scheduler {
    draft: Draft,
    /// Seconds of a round that does not draft.
    plain: Mean,
    /// Seconds of a round that drafts and verifies k tokens, by k.
    costs: Vec<Mean>,
    /// Share of verified tokens that are accepted when those before them are, by place.
    accepted: Vec<Mean>,
    /// Tokens and seconds of rounds that draft.
    made: Mean,
    taken: Mean,
    /// Round before which nothing is drafted, and the length of the next pause.
    resume: u64,
    pause: u64,
    /// Drafted rounds since the last pause.
    tried: u32,
    counters: Counters,
}

/// How a round drafts, by what was known when it began.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// Tokens to verify, whatever they promise; none to verify as many as pay.
    pub verify: Option<usize>,
    /// Seconds of a round that verifies k tokens, by k.
    pub costs: Vec<f32>,
    /// Share of verified tokens that are accepted when those before them are, by place.
    pub accepted: Vec<f32>,
}

impl Plan {
    /// What the round promises before its first token is drafted.
    pub fn outlook(&self) -> Outlook<'_> {
        Outlook { plan: self, survival: 1.0, expected: 1.0, places: 0 }
    }
}

/// What a round promises as its block is taken from left to right. Twin of what `draft_pick` does on the device, in the same
/// arithmetic.
#[derive(Debug, Clone)]
pub struct Outlook<'a> {
    plan: &'a Plan,
    /// Probability that all tokens taken so far are accepted.
    survival: f32,
    /// Tokens that the round makes of them.
    expected: f32,
    places: usize,
}

impl Outlook<'_> {
    /// Whether to verify the token at the next place of the block. `confidence` is the probability that it is accepted when those
    /// before it are. Not to be asked again once the answer is no.
    pub fn more(&mut self, confidence: f32) -> bool {
        let Self { plan, places: place, .. } = *self;
        self.places += 1;
        let stopping = self.expected / plan.costs[place];
        self.survival *= confidence;
        self.expected += self.survival;
        if let Some(tokens) = plan.verify {
            return place < tokens;
        }
        let (mut alive, mut made) = (self.survival, self.expected);
        for k in place + 1..plan.costs.len() {
            if made / plan.costs[k] > stopping {
                return true;
            }
            if let Some(accepted) = plan.accepted.get(k) {
                alive *= accepted;
                made += alive;
            }
        }
        false
    }
}

/// A mean in which old values fade.
#[derive(Debug, Clone, Copy, Default)]
struct Mean {
    value: f64,
    count: u32,
    /// Round of the last value.
    round: u64,
}

impl Mean {
    fn add(&mut self, value: f64, round: u64) {
        self.count = self.count.saturating_add(1);
        self.value += (value - self.value) / (self.count as f64).min(MEMORY);
        self.round = round;
    }

    fn is_due(&self, round: u64) -> bool {
        self.count < TRUSTED || round - self.round > STALE
    }
}

impl Scheduler {
    /// For a model whose blocks have `block` tokens.
    pub fn new(draft: Draft, block: usize) -> Self {
        let counters = Counters { verified: vec![0; block], accepted: vec![0; block], ..Counters::default() };
        Self {
            draft: if block == 0 { Draft::Off } else { draft },
            plain: Mean::default(),
            costs: vec![Mean::default(); block + 1],
            accepted: vec![Mean::default(); block],
            made: Mean::default(),
            taken: Mean::default(),
            resume: 0,
            pause: PAUSE.0,
            tried: 0,
            counters,
        }
    }

    /// What it was asked for.
    pub fn draft(&self) -> Draft {
        self.draft
    }

    /// What drafting did so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Begins a round: how it drafts, or none when it does not. Others may be under way: it knows those that have ended.
    pub fn begin(&self) -> Option<Plan> {
        let round = self.counters.rounds;
        let verify = match self.draft {
            Draft::Off => return None,
            Draft::Tokens(tokens) => Some(tokens),
            Draft::Auto if round < self.resume || self.plain.is_due(round) => return None,
            Draft::Auto => (0..self.costs.len()).rev().find(|&k| self.costs[k].is_due(round)),
        };
        let values = |means: &[Mean]| means.iter().map(|mean| mean.value as f32).collect();
        Some(Plan { verify, costs: values(&self.costs), accepted: values(&self.accepted) })
    }

    /// Ends a round that drafted as `plan` says, or did not.
    pub fn end(&mut self, plan: Option<&Plan>, round: Round) {
        let number = self.counters.rounds;
        self.counters.rounds += 1;
        self.counters.tokens += round.tokens as u64;
        if let Some(seconds) = round.seconds {
            self.counters.timed += 1;
            self.counters.seconds += seconds;
        }
        let Some(plan) = plan else {
            round.seconds.into_iter().for_each(|seconds| self.plain.add(seconds, number));
            return;
        };
        self.counters.drafted += 1;
        // Nothing was asked of the places behind a token that ended the text.
        let (ended, verified) = (round.tokens <= round.accepted, round.verified);
        let most = if ended { round.tokens } else { verified };
        let round = Round { verified: verified.min(most), accepted: round.accepted.min(most), ..round };
        for place in 0..round.verified {
            self.counters.verified[place] += 1;
            self.counters.accepted[place] += (place < round.accepted) as u64;
        }
        // A refused token says nothing of the places behind it.
        for place in 0..round.verified.min(round.accepted + 1) {
            self.accepted[place].add((place < round.accepted) as u32 as f64, number);
        }
        let Some(seconds) = round.seconds else { return };
        self.costs[verified].add(seconds, number);
        if plan.verify.is_none() {
            self.made.add(round.tokens as f64, number);
            self.taken.add(seconds, number);
            self.tried += 1;
            self.judge();
        }
    }

    /// Pauses drafting that makes fewer tokens a second than none, for longer each time.
    fn judge(&mut self) {
        if self.tried < TRIAL {
            return;
        }
        if self.made.value * self.plain.value >= self.taken.value {
            self.pause = PAUSE.0;
            return;
        }
        self.resume = self.counters.rounds + self.pause;
        self.pause = (2 * self.pause).min(PAUSE.1);
        (self.made, self.taken, self.tried) = (Mean::default(), Mean::default(), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device on which a round takes `seconds[k]` when it drafts and verifies k tokens, and `plain` when it does not.
    struct Device {
        plain: f64,
        seconds: Vec<f64>,
    }

    impl Device {
        /// A round in which the tokens at all places have these confidences, and `accepted` of them would be.
        fn round(&self, scheduler: &mut Scheduler, confidences: &[f32], accepted: usize) -> (bool, Round) {
            let plan = scheduler.begin();
            let verified = plan.as_ref().map_or(0, |plan| {
                let mut outlook = plan.outlook();
                confidences.iter().take_while(|&&confidence| outlook.more(confidence)).count()
            });
            let seconds = if plan.is_some() { self.seconds[verified] } else { self.plain };
            let accepted = accepted.min(verified);
            let round = Round { tokens: 1 + accepted, verified, accepted, seconds: Some(seconds) };
            scheduler.end(plan.as_ref(), round);
            (plan.is_some(), round)
        }
    }

    /// Rounds until every figure was taken.
    fn measured(device: &Device, confidences: &[f32], accepted: usize) -> Scheduler {
        let mut scheduler = Scheduler::new(Draft::Auto, confidences.len());
        let mut seen = vec![0; confidences.len() + 1];
        for _ in 0..2 * (confidences.len() + 2) {
            let (drafted, round) = device.round(&mut scheduler, confidences, accepted);
            seen[round.verified] += drafted as u32;
        }
        assert!(seen.iter().all(|&n| n >= TRUSTED), "{seen:?}");
        assert!(!scheduler.plain.is_due(scheduler.counters.rounds));
        scheduler
    }

    #[test]
    fn verifies_as_many_as_pay() {
        // Two more rows cost little, the third much.
        let device = Device { plain: 1.0, seconds: vec![1.1, 1.15, 1.2, 2.4, 2.5] };
        let mut scheduler = measured(&device, &[0.8; 4], 3);
        for (confidences, expected) in [
            ([0.9, 0.9, 0.9, 0.9], 2),
            ([0.9, 0.9, 0.99, 0.99], 2),
            ([0.01, 0.01, 0.01, 0.01], 0),
            ([0.9, 0.01, 0.99, 0.99], 1),
        ] {
            assert_eq!(device.round(&mut scheduler, &confidences, 4).1.verified, expected, "{confidences:?}");
        }
        // The same confidences on a device where rows are free.
        let device = Device { plain: 1.0, seconds: vec![1.1; 5] };
        let mut scheduler = measured(&device, &[0.8; 4], 3);
        assert_eq!(device.round(&mut scheduler, &[0.9; 4], 4).1.verified, 4);
    }

    #[test]
    fn drafting_that_does_not_pay_pauses_and_comes_back() {
        let device = Device { plain: 1.0, seconds: vec![1.2, 1.4, 1.6] };
        let mut scheduler = measured(&device, &[0.5; 2], 0);
        let mut rounds = vec![];
        for _ in 0..3000 {
            rounds.push(device.round(&mut scheduler, &[0.5; 2], 0).0);
        }
        let drafted = rounds.iter().filter(|&&drafted| drafted).count();
        assert!((8..200).contains(&drafted), "{drafted} of 3000 rounds drafted");
        let longest = rounds.chunk_by(|a, b| a == b).filter(|run| !run[0]).map(<[bool]>::len).max().unwrap();
        assert!((PAUSE.1 as usize..PAUSE.1 as usize + 4).contains(&longest), "{longest}");

        // The text becomes easy: within the longest pause drafting is back, and stays.
        for _ in 0..PAUSE.1 + 64 {
            device.round(&mut scheduler, &[0.9; 2], 2);
        }
        let drafted = (0..200).filter(|_| device.round(&mut scheduler, &[0.9; 2], 2).0).count();
        assert!(drafted >= 196, "{drafted} of 200");
        let counters = scheduler.counters();
        assert_eq!(counters.rounds, 8 + 3000 + 1024 + 64 + 200);
        assert!(counters.accepted[1] <= counters.accepted[0] && counters.accepted[0] <= counters.verified[0]);
    }

    /// A text that ends in a place of the block ends its counts there, the ending token's place included.
    #[test]
    fn places_behind_the_end_do_not_count() {
        let mut scheduler = Scheduler::new(Draft::Tokens(4), 4);
        let mut end = |tokens, accepted| {
            let plan = scheduler.begin();
            scheduler.end(plan.as_ref(), Round { tokens, verified: 4, accepted, seconds: None });
            (scheduler.counters().verified.clone(), scheduler.counters().accepted.clone())
        };
        assert_eq!(end(2, 4), (vec![1, 1, 0, 0], vec![1, 1, 0, 0]));
        assert_eq!(end(4, 4), (vec![2, 2, 1, 1], vec![2, 2, 1, 1]));
        // One that ends in the token behind what was accepted had all places judged.
        assert_eq!(end(3, 2), (vec![3, 3, 2, 2], vec![3, 3, 1, 1]));
    }

    #[test]
    fn a_growing_cost_is_noticed() {
        let mut device = Device { plain: 1.0, seconds: vec![1.1, 1.2, 1.3] };
        let mut scheduler = measured(&device, &[0.9; 2], 2);
        assert_eq!(device.round(&mut scheduler, &[0.9; 2], 2).1.verified, 2);
        device = Device { plain: 1.0, seconds: vec![1.1, 1.2, 9.0] };
        let last = (0..600).map(|_| device.round(&mut scheduler, &[0.9; 2], 2)).filter(|(drafted, _)| *drafted);
        assert_eq!(last.collect::<Vec<_>>()[550..].iter().filter(|(_, round)| round.verified == 2).count(), 0);
    }

    #[test]
    fn a_number_is_kept_to() {
        let device = Device { plain: 1.0, seconds: vec![9.0; 4] };
        for tokens in 0..=3 {
            let mut scheduler = Scheduler::new(Draft::Tokens(tokens), 3);
            let rounds = (0..50).map(|_| device.round(&mut scheduler, &[0.1; 3], 0));
            assert!(rounds.into_iter().all(|(drafted, round)| drafted && round.verified == tokens));
        }
        for (draft, block) in [(Draft::Off, 3), (Draft::Auto, 0)] {
            let mut scheduler = Scheduler::new(draft, block);
            assert!((0..50).all(|_| !device.round(&mut scheduler, &vec![0.9; block], 0).0));
        }
    }

    #[test]
    fn numbers_beyond_a_block_are_refused() {
        assert!(
            Draft::Tokens(5).validate(5).is_ok() && Draft::Auto.validate(0).is_ok() && Draft::Off.validate(0).is_ok()
        );
        let error = |tokens: usize, block| Draft::Tokens(tokens).validate(block).unwrap_err().to_string();
        assert_eq!(error(6, 5), "setting `draft`: found 6, allowed: auto, off, or at most 5 tokens");
        assert_eq!(error(0, 0), "setting `draft`: found 0, allowed: auto or off: the model has no draft stages");
    }
}
